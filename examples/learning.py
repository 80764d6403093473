"""The loop of the example programs that compare a model before and after training on held-out scenarios.

A program brings a rollout and a function that draws a scenario from a seed. Held-out scenarios have separate seeds.
"""

import argparse
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from program import flag_parser, make_backend, make_model, plot, report, train_config

import art

S = TypeVar("S")
Rollout = Callable[[art.TrainableModel, S], Awaitable[art.Trajectory]]


def learner_parser(
    description: str, groups: int, learning_rates: Mapping[str, float], steps: int = 30
) -> argparse.ArgumentParser:
    """The flags of every program, and the number of held-out scenarios."""
    parser = flag_parser(description, groups, learning_rates)
    parser.set_defaults(steps=steps, max_exceptions=0.1)
    parser.add_argument("--held-out", type=int, default=64, help="scenarios that are not trained")
    return parser


async def learn(
    flags: argparse.Namespace,
    project: str,
    rollout: Rollout[S],
    draw: Callable[[str], S],
    names: Sequence[str] = (),
) -> None:
    """A whole program: trains up to step `--steps`, prints the comparison with step 0, and plots."""
    model = make_model(flags, project)
    async with make_backend(flags) as backend:
        await model.register(backend)
        first_step = await model.get_step()
        rewards = await train(model, flags, rollout, draw, names)
        await compare(model, flags, rollout, draw)
    if rewards:
        plot({"reward": rewards}, flags.plot, project.replace("-", " "), first_step)


async def train(
    model: art.TrainableModel,
    flags: argparse.Namespace,
    rollout: Rollout[S],
    draw: Callable[[str], S],
    names: Sequence[str] = (),
) -> list[float]:
    """Trains up to step `--steps`, and prints the means of the reward and of the metrics `names`. Returns the mean
    reward before each step."""
    rewards: list[float] = []
    for step in range(await model.get_step(), flags.steps):
        groups = await gather(model, flags, rollout, draw, step)
        result = await model.train(groups, config=train_config(flags))
        rewards.append(report(result, model.name, names))
    return rewards


async def gather(
    model: art.TrainableModel,
    flags: argparse.Namespace,
    rollout: Rollout[S],
    draw: Callable[[str], S],
    step: int,
    after_each: Callable[[art.TrajectoryGroup], Awaitable[art.TrajectoryGroup | None]] | None = None,
) -> list[art.TrajectoryGroup]:
    """One group of rollouts for each scenario of a step, as `after_each` returns the group."""
    scenarios = [draw(f"{step} {number}") for number in range(flags.groups)]
    return await art.gather_trajectory_groups(
        (art.TrajectoryGroup(rollout(model, scenario) for _ in range(flags.group_size)) for scenario in scenarios),
        pbar_desc=f"step {step}",
        max_exceptions=flags.max_exceptions,
        after_each=after_each,
    )


async def compare(
    model: art.TrainableModel,
    flags: argparse.Namespace,
    rollout: Rollout[S],
    draw: Callable[[str], S],
    baseline: int = 0,
) -> art.Evaluation:
    """Prints the mean rewards of the newest step and of step `baseline` on held-out scenarios, with 95% intervals."""
    held_out = [draw(f"held out {number}") for number in range(flags.held_out)]
    result = await art.evaluate(model, rollout, held_out, baseline=baseline, max_exceptions=flags.max_exceptions)
    print(result)
    return result
