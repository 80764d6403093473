"""Yes, no, maybe: the smallest agent that learns.

The agent is asked to answer with yes, no or maybe; "maybe" is worth 1, "no" .75, "yes" .5, all else nothing. It starts
where the base model stands and should end saying "maybe". Without --server an art-server is started for the run.

    python examples/yes_no_maybe.py [--model art/tiny] [--steps 30] [--server http://127.0.0.1:7623]
"""

import argparse
import asyncio
import itertools
import statistics
from pathlib import Path

import openai
from program import plot

import art

REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}

LEARNING_RATES = {"art/tiny": 1e-3, "smollm2": 2e-4}
"""What worked on these models with the default LoRA; other models begin at 1e-4."""

PROMPTS = [
    f"{verb} with {form}"
    for verb in ("respond", "answer")
    for words in itertools.permutations(REWARDS)
    for form in (", ".join(words), " or ".join(f'"{word}"' for word in words))
]


def score(answer: str | None) -> float:
    """The reward of an answer: its word, whatever its case and full stop."""
    return REWARDS.get((answer or "").strip().strip(".!\"'").lower(), 0.0)


async def rollout(
    client: openai.AsyncOpenAI, model: art.TrainableModel, prompt: str
) -> art.Trajectory:
    messages: art.Messages = [{"role": "user", "content": prompt}]
    completion = await client.chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=12
    )
    choice = completion.choices[0]
    return art.Trajectory(
        messages_and_choices=[*messages, choice], reward=score(choice.message.content)
    )


async def sample_answers(client: openai.AsyncOpenAI, model: art.TrainableModel) -> list[str]:
    trajectories = await asyncio.gather(*(rollout(client, model, p) for p in PROMPTS[:6]))
    return [repr(str(t.messages()[-1].get("content"))) for t in trajectories]


async def train(
    model: art.TrainableModel, steps: int, prompts_per_step: int, group_size: int
) -> list[float]:
    """Train for some steps; returns the mean reward before each of them."""
    client = model.openai_client()
    rate = LEARNING_RATES.get(model.base_model, 1e-4)
    rewards: list[float] = []
    print("before:", ", ".join(await sample_answers(client, model)))
    for step in range(await model.get_step(), steps):
        first = step * prompts_per_step
        prompts = [PROMPTS[i % len(PROMPTS)] for i in range(first, first + prompts_per_step)]
        groups = await art.gather_trajectory_groups(
            (
                art.TrajectoryGroup(rollout(client, model, prompt) for _ in range(group_size))
                for prompt in prompts
            ),
            pbar_desc=f"step {step}",
        )
        rewards.append(statistics.fmean(t.reward for group in groups for t in group))
        result = await model.train(groups, config=art.TrainConfig(learning_rate=rate))
        gap = result.metrics.get("loss/logprob_gap_mean", 0.0)
        print(f"step {result.step:3d}  mean reward {rewards[-1]:.3f}  engine-trainer gap {gap:.4f}")
    print("after: ", ", ".join(await sample_answers(client, model)))
    return rewards


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", default="art/tiny", help="base model: art/tiny, smollm2, a folder or a hub id"
    )
    parser.add_argument(
        "--name", default=None, help="name of the trained model (default: made from --model)"
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=4, help="prompts, and so groups, per step")
    parser.add_argument("--group-size", type=int, default=8, help="rollouts per prompt")
    parser.add_argument("--server", default=None, help="URL of a running art-server")
    parser.add_argument(
        "--path", default=".art", help="where a server of its own keeps checkpoints and history"
    )
    parser.add_argument("--plot", type=Path, default=Path("reward.png"))
    flags = parser.parse_args()

    name = flags.name or "yes-no-maybe-" + flags.model.replace("/", "-").lower().strip(".-")
    model = art.TrainableModel(name=name, project="quickstart", base_model=flags.model)
    backend = art.Backend(flags.server) if flags.server else art.LocalBackend(path=flags.path)
    async with backend:
        await model.register(backend)
        rewards = await train(model, flags.steps, flags.prompts, flags.group_size)
    if rewards:
        plot({"reward": rewards}, flags.plot, "yes, no, maybe")
        last = statistics.fmean(rewards[-3:])
        print(
            f"mean reward: first step {rewards[0]:.3f}, last three steps {last:.3f}; plot: {flags.plot}"
        )
    folder = Path(flags.path) / "quickstart" / "models" / name
    if not flags.server:
        print(f"checkpoints and history: {folder}")


if __name__ == "__main__":
    asyncio.run(main())
