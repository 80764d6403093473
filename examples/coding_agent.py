"""A coding agent learns from the tests of its tasks: each rollout runs the agent in a sandbox of its own, and the reward is the tests'.

The tasks are folders in Harbor's format, and the agent is any program that takes a base URL, a key and a model from its environment.
Without flags: the sixty lines of examples/coding/agent.py, two tasks that art/tiny can learn, and bubblewrap (Linux). Without --server the
program starts an art-server.

    python examples/coding_agent.py [--tasks DIR] [--agent "python3 /agent/agent.py {instruction}"] [--steps 15]
"""

import asyncio
import itertools
import statistics
from pathlib import Path

from program import flag_parser, make_backend, make_model, plot, train_config

import art
from art import harbor

FOLDER = Path(__file__).resolve().parent / "coding"


async def main() -> None:
    parser = flag_parser((__doc__ or "").splitlines()[0], 6, {"art/tiny": 2e-3})
    parser.set_defaults(steps=15)
    parser.add_argument("--tasks", type=Path, default=FOLDER / "tasks", help="folder of tasks")
    parser.add_argument("--agent", default="python3 /agent/agent.py {instruction}", help="the agent's command")
    parser.add_argument("--agent-folder", type=Path, default=FOLDER, help="folder that the sandbox has as /agent")
    flags = parser.parse_args()
    tasks = harbor.tasks(flags.tasks)
    sandbox = harbor.Bubblewrap(mounts={"/agent": flags.agent_folder})
    model = make_model(flags, "coding-agent")

    async def rollout(task: harbor.Task) -> art.Trajectory:
        async with art.rollout(model) as r:
            return await harbor.run(task, flags.agent, r, sandbox=sandbox)

    rewards: list[float] = []
    async with make_backend(flags) as backend:
        await model.register(backend)
        first_step = await model.get_step()
        for step in range(first_step, flags.steps):
            chosen = itertools.islice(itertools.cycle(tasks), step * flags.groups, (step + 1) * flags.groups)
            groups = await art.gather_trajectory_groups(
                (art.TrajectoryGroup(rollout(task) for _ in range(flags.group_size)) for task in chosen),
                pbar_desc=f"step {step}",
                max_exceptions=0.1,
            )
            rewards.append(statistics.fmean(trajectory.reward for group in groups for trajectory in group))
            result = await model.train(groups, config=train_config(flags))
            print(f"step {result.step:3d}  mean reward {rewards[-1]:.3f}")
    if rewards:
        plot({"reward": rewards}, flags.plot, "a coding agent", first_step)
        print(
            f"mean reward: first step {rewards[0]:.3f}, last three steps {statistics.fmean(rewards[-3:]):.3f}; plot: {flags.plot}"
        )


if __name__ == "__main__":
    asyncio.run(main())
