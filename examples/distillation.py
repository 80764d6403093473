"""On-policy distillation: a student learns rock, paper, scissors from a teacher's probabilities, without rewards.

The teacher learns the game of `rock_paper_scissors.py` by GRPO first. Then the student plays, and the teacher returns
its own log-probability of each token that the student sampled (docs/howto/distillation.md). Rewards are only printed.
For a real model change `--model`, take a larger model with the same tokenizer as the teacher, and a rate of 1e-4.

    python examples/distillation.py [--teacher-steps 8] [--steps 6] [--server http://127.0.0.1:7623]
"""

import argparse
import asyncio
from functools import partial

from learning import compare, gather, learner_parser, train
from program import make_backend, make_model, plot, report, train_config
from rock_paper_scissors import LEARNING_RATES, rollout

import art


async def teach(student: art.TrainableModel, teacher: art.TrainableModel, flags: argparse.Namespace) -> list[float]:
    """Trains the student up to step `--steps`. Returns the student's mean reward before each step."""
    rewards: list[float] = []
    for step in range(await student.get_step(), flags.steps):
        # The teacher scores tokens, so the student's choices carry their tokens.
        groups = await gather(student, flags, partial(rollout, logprobs=True), str, step)
        groups = await art.distill(groups, teacher)
        result = await student.train(groups, config=train_config(flags))
        rewards.append(report(result, student.name, ("teacher_gap", "paper")))
    return rewards


async def main() -> None:
    parser = learner_parser("On-policy distillation.", 4, {"art/tiny": 4e-3}, steps=6)
    parser.add_argument("--teacher-steps", type=int, default=8)
    flags = parser.parse_args()
    of_teacher = {"steps": flags.teacher_steps, "learning_rates": LEARNING_RATES}
    teacher = make_model(flags, "distillation", "-teacher")
    student = make_model(flags, "distillation", "-student")
    async with make_backend(flags) as backend:
        await teacher.register(backend)
        await student.register(backend)
        first_step = await student.get_step()
        await train(teacher, argparse.Namespace(**{**vars(flags), **of_teacher}), rollout, str)
        taught = await compare(teacher, flags, rollout, str)
        rewards = await teach(student, teacher, flags)
        await compare(student, flags, rollout, str)
    if rewards:
        curves = {"student": rewards, "teacher, held out": [taught.reward.mean] * len(rewards)}
        plot(curves, flags.plot, "distillation", first_step)


if __name__ == "__main__":
    asyncio.run(main())
