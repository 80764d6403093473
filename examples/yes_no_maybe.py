"""Yes, no, maybe: the smallest agent that learns.

The prompt requests an answer of yes, no or maybe. The reward is 1 for "maybe", 0.75 for "no", 0.5 for "yes", and 0 for
other answers. A trained agent should answer "maybe". Without --server the program starts an art-server.

    python examples/yes_no_maybe.py [--model art/tiny] [--steps 30] [--server http://127.0.0.1:7623]
"""

import argparse
import asyncio
import itertools
import statistics
from pathlib import Path

import openai
from program import flag_parser, make_backend, make_model, plot, train_config

import art

REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}

GROUP_SIZES = {"smollm2": 16}
"""Rollouts per prompt. A model that seldom answers in one word needs more, so that a group contains such an answer."""

PROMPTS = [
    f"{verb} with {form}"
    for verb in ("respond", "answer")
    for words in itertools.permutations(REWARDS)
    for form in (", ".join(words), " or ".join(f'"{word}"' for word in words))
]


def score(answer: str | None) -> float:
    """The reward of an answer. Case, quotation marks and final punctuation do not matter."""
    return REWARDS.get((answer or "").strip().strip(".!\"'").lower(), 0.0)


async def rollout(client: openai.AsyncOpenAI, model: art.TrainableModel, prompt: str) -> art.Trajectory:
    messages: art.Messages = [{"role": "user", "content": prompt}]
    completion = await client.chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=12
    )
    choice = completion.choices[0]
    return art.Trajectory(messages_and_choices=[*messages, choice], reward=score(choice.message.content))


async def sample_answers(client: openai.AsyncOpenAI, model: art.TrainableModel) -> list[str]:
    trajectories = await asyncio.gather(*(rollout(client, model, p) for p in PROMPTS[:6]))
    return [repr(str(t.messages()[-1].get("content"))) for t in trajectories]


async def train(model: art.TrainableModel, flags: argparse.Namespace) -> list[float]:
    """Trains up to step `--steps`. Returns the mean reward before each step."""
    client = model.openai_client()
    # Each answer has the same weight. With normalisation by tokens, long wrong answers would outweigh short right ones.
    config = train_config(flags, normalisation="trajectory")
    rewards: list[float] = []
    print("before:", ", ".join(await sample_answers(client, model)))
    for step in range(await model.get_step(), flags.steps):
        first = step * flags.groups
        prompts = [PROMPTS[i % len(PROMPTS)] for i in range(first, first + flags.groups)]
        groups = await art.gather_trajectory_groups(
            (
                art.TrajectoryGroup(rollout(client, model, prompt) for _ in range(flags.group_size))
                for prompt in prompts
            ),
            pbar_desc=f"step {step}",
        )
        rewards.append(statistics.fmean(t.reward for group in groups for t in group))
        result = await model.train(groups, config=config)
        gap = result.metrics.get("loss/logprob_gap_mean", 0.0)
        print(f"step {result.step:3d}  mean reward {rewards[-1]:.3f}  engine-trainer gap {gap:.4f}")
    print("after: ", ", ".join(await sample_answers(client, model)))
    return rewards


async def main() -> None:
    parser = flag_parser((__doc__ or "").splitlines()[0], 6, {"art/tiny": 1e-3, "smollm2": 5e-4})
    parser.set_defaults(group_size=None)
    flags = parser.parse_args()
    flags.group_size = flags.group_size or GROUP_SIZES.get(flags.model, 8)
    model = make_model(flags, "yes-no-maybe")
    async with make_backend(flags) as backend:
        await model.register(backend)
        rewards = await train(model, flags)
    if rewards:
        plot({"reward": rewards}, flags.plot, "yes, no, maybe")
        last = statistics.fmean(rewards[-3:])
        print(f"mean reward: first step {rewards[0]:.3f}, last three steps {last:.3f}; plot: {flags.plot}")
    if not flags.server:
        folder = Path(flags.path) / model.project / "models" / model.name
        print(f"checkpoints and history: {folder}")


if __name__ == "__main__":
    asyncio.run(main())
