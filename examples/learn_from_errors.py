"""Text about errors trains where rewards cannot: a model as its own teacher.

A conversation has four questions, each of which offers yes, no and maybe. Only four times "no" is right, which the model says in
one conversation of several hundred. So nearly all groups have reward 0 only, and GRPO has nothing to compare. But the checker also says
in words what it wants. With --method text these words train the groups of zeros: the model as it was before the first step reads
the words behind each question, and the trained model, which does not read them, comes closer to its probabilities
(docs/howto/distillation.md). Rewards train the other groups. With --method grpo only the rewards train.

    python examples/learn_from_errors.py [--method text grpo] [--seed 0 1 2] [--steps 16] [--server http://127.0.0.1:7623]
"""

import argparse
import asyncio
import itertools
import random
import statistics
from collections.abc import Iterable

from program import flag_parser, make_backend, make_model, plot, train_config
from yes_no_maybe import PROMPTS

import art

QUESTIONS = [prompt for prompt in PROMPTS if prompt.startswith("respond")]
NUM_QUESTIONS = 4
WANTED = "no"
TOP_K = 20
"""Tokens of the teacher at each answer's token: as many as vLLM gives by default."""


async def rollout(model: art.TrainableModel, questions: list[str], seed: int) -> art.Trajectory:
    """A conversation. Its metadata have what the checker says, None if nothing is wrong."""
    trajectory = art.Trajectory()
    for number, question in enumerate(questions):
        trajectory.messages_and_choices.append({"role": "user", "content": question})
        completion = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(),
            messages=trajectory.messages(),
            max_tokens=12,
            seed=seed + number,
            logprobs=True,
        )
        trajectory.messages_and_choices.append(completion.choices[0])
    answers = [message.get("content") for message in trajectory.messages()[1::2]]
    is_right = answers == [WANTED] * NUM_QUESTIONS
    trajectory.reward = float(is_right)
    trajectory.metadata["error"] = None if is_right else f"Say {WANTED}"
    return trajectory


def hint(messages: art.Messages, trajectory: art.Trajectory, _: art.TrajectoryGroup) -> art.Messages | None:
    """What the teacher reads before an answer: the conversation up to the question, and what the checker said."""
    return art.with_feedback(messages, feedback=trajectory.metadata["error"])


def first_step(model: art.TrainableModel) -> art.Model:
    """The model before its first step. A teacher that learns with its student forgets with it, too, such as to end an answer."""
    return art.Model(
        name="teacher",
        project=model.project,
        inference_model_name=model.get_inference_name(step=0),
        inference_base_url=model.inference_base_url,
        inference_api_key=model.inference_api_key,
    )


async def sample(
    model: art.TrainableModel, flags: argparse.Namespace, seed: int, step: int
) -> list[art.TrajectoryGroup]:
    dice = random.Random(f"{seed} {step}")
    conversations = [dice.sample(QUESTIONS, NUM_QUESTIONS) for _ in range(flags.groups)]
    return await art.gather_trajectory_groups(
        (
            art.TrajectoryGroup(rollout(model, questions, dice.getrandbits(32)) for _ in range(flags.group_size))
            for questions in conversations
        ),
        pbar_desc=f"step {step}",
    )


def mean_reward(groups: Iterable[art.TrajectoryGroup]) -> float:
    return statistics.fmean(trajectory.reward for group in groups for trajectory in group)


async def train(model: art.TrainableModel, flags: argparse.Namespace, method: str, seed: int) -> list[float]:
    """Trains up to step `--steps`. Returns the mean reward before each step and after the last."""
    rewards: list[float] = []
    teacher = first_step(model)
    for step in range(await model.get_step(), flags.steps):
        groups = await sample(model, flags, seed, step)
        rewards.append(mean_reward(groups))
        zeros = [group for group in groups if not any(trajectory.reward for trajectory in group)]
        others = [group for group in groups if any(trajectory.reward for trajectory in group)]
        if method == "text":
            zeros = await art.distill(zeros, teacher, teacher_messages=hint, top_k=TOP_K)
        # With distill_alpha=0, KL(teacher || student), an answer of the teacher that the model never samples is learned, too.
        config = train_config(flags, normalisation="trajectory", distill_alpha=0.0)
        result = await model.train([*zeros, *others], config=config)
        print(
            f"step {result.step:3d}  reward {rewards[-1]:.3f}  groups of zeros {len(zeros)} of {len(groups)}",
            flush=True,
        )
    await teacher.close()
    rewards.append(mean_reward(await sample(model, flags, seed, flags.steps)))
    print(f"{method}, seed {seed}: reward {rewards[-1]:.3f} at step {flags.steps}", flush=True)
    return rewards


async def main() -> None:
    parser = flag_parser((__doc__ or "").splitlines()[0], 8, {"art/tiny": 2e-3})
    parser.set_defaults(steps=16, group_size=4)
    parser.add_argument("--method", nargs="+", choices=["text", "grpo"], default=["text"])
    parser.add_argument(
        "--seed", nargs="+", type=int, default=[0], help="of the questions and the answers: a run for each"
    )
    flags = parser.parse_args()
    curves: dict[str, list[float]] = {}
    async with make_backend(flags) as backend:
        for method, seed in itertools.product(flags.method, flags.seed):
            model = make_model(flags, "learn-from-errors", f"-{method}-{seed}")
            await model.register(backend)
            curves[f"{method}, seed {seed}"] = await train(model, flags, method, seed)
    plot(curves, flags.plot, "learn from errors")


if __name__ == "__main__":
    asyncio.run(main())
