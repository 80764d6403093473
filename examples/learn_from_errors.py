"""Text about errors trains where rewards cannot: a model as its own teacher.

A question offers yes, no and maybe, but the checker wants another word, which the model says once in a hundred answers. Nearly
all groups have reward 0 only, so GRPO has nothing to compare. The checker also says in words what was wrong. With --method text
the model reads the checker's words behind the question, and its probabilities of the answer's tokens then train it
(docs/howto/distillation.md). With --method grpo only the rewards train it.

    python examples/learn_from_errors.py [--method text] [--seed 0] [--steps 20] [--server http://127.0.0.1:7623]
"""

import argparse
import asyncio
import random
import statistics
from collections.abc import Iterable
from functools import partial

from program import flag_parser, make_backend, make_model, plot, train_config
from yes_no_maybe import PROMPTS

import art

WANTED = {"respond": "perhaps", "answer": "right"}
"""The wanted word, by the verb of the question."""


async def rollout(model: art.TrainableModel, question: str, seed: int) -> art.Trajectory:
    """One answer. The metadata have the checker's words about a wrong one."""
    messages: art.Messages = [{"role": "user", "content": question}]
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=12, seed=seed, logprobs=True
    )
    choice = completion.choices[0]
    wanted = WANTED[question.split()[0]]
    is_right = (choice.message.content or "").strip().strip(".!\"'").lower() == wanted
    error = None if is_right else f"Say {wanted}"
    return art.Trajectory(messages_and_choices=[*messages, choice], reward=float(is_right), metadata={"error": error})


def hint(messages: art.Messages, trajectory: art.Trajectory, group: art.TrajectoryGroup) -> art.Messages | None:
    """What the teacher reads: another answer of the group that is right, or else the checker's words."""
    others = (sibling for sibling in group if sibling is not trajectory and sibling.reward == 1)
    solution = next((str(other.messages()[-1].get("content")) for other in others), None)
    return art.with_feedback(messages, feedback=trajectory.metadata["error"], solution=solution)


async def sample(model: art.TrainableModel, flags: argparse.Namespace, step: int) -> list[art.TrajectoryGroup]:
    dice = random.Random(f"{flags.seed} {step}")
    questions = dice.sample(PROMPTS, flags.groups)
    return await art.gather_trajectory_groups(
        (
            art.TrajectoryGroup(rollout(model, question, dice.getrandbits(32)) for _ in range(flags.group_size))
            for question in questions
        ),
        pbar_desc=f"step {step}",
    )


def mean_reward(groups: Iterable[art.TrajectoryGroup]) -> float:
    return statistics.fmean(trajectory.reward for group in groups for trajectory in group)


async def train(model: art.TrainableModel, flags: argparse.Namespace) -> list[float]:
    """Trains up to step `--steps`. Returns the mean reward before each step."""
    teach = partial(art.distill, teacher=model, teacher_messages=hint)
    rewards: list[float] = []
    for step in range(await model.get_step(), flags.steps):
        groups = await sample(model, flags, step)
        num_zero = sum(not any(trajectory.reward for trajectory in group) for group in groups)
        if flags.method == "text":
            groups = await teach(groups)
        rewards.append(mean_reward(groups))
        result = await model.train(groups, config=train_config(flags, normalisation="trajectory"))
        print(
            f"step {result.step:3d}  reward {rewards[-1]:.3f}  groups of zeros {num_zero} of {len(groups)}", flush=True
        )
    return rewards


async def main() -> None:
    parser = flag_parser((__doc__ or "").splitlines()[0], 8, {"art/tiny": 2e-3})
    parser.set_defaults(steps=20, group_size=4)
    parser.add_argument("--method", choices=["text", "grpo"], default="text")
    parser.add_argument("--seed", type=int, default=0, help="of the questions and the answers")
    flags = parser.parse_args()
    model = make_model(flags, "learn-from-errors", f"-{flags.method}-{flags.seed}")
    async with make_backend(flags) as backend:
        await model.register(backend)
        first_step = await model.get_step()
        rewards = await train(model, flags)
        if rewards:
            last = mean_reward(await sample(model, flags, flags.steps))
            print(f"reward: first step {rewards[0]:.3f}, at step {flags.steps} {last:.3f}")
            plot({flags.method: [*rewards, last]}, flags.plot, "learn from errors", first_step)


if __name__ == "__main__":
    asyncio.run(main())
