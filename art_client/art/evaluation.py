"""`evaluate`: the mean reward of a model's rollouts on scenarios, with its uncertainty.

    result = await art.evaluate(model, rollout, scenarios, step=30, baseline=0)
    print(result.reward.mean, result.difference.interval)

`evaluate` evaluates one step, or two steps on the same scenarios (paired). The rollout function is the function that
training uses, too. The function gets a copy of the model: the copy's `get_inference_name()`, `inference_model_name` and
`name` name the evaluated step.

With `seed`, each request of the copy's `openai_client()`, and of any client with the address or the key of an `art.rollout`, has a
seed, computed from `seed`, the scenario, the repetition and the number of the request. Partners get the same seeds. The same call
then gives the same rewards, as far as the rollout's own code and the engine's arithmetic repeat.

A rollout that raises, or whose reward or metric is not a finite number, has failed and has no reward.
`estimates.py` has the formulas.
"""

# pyright: reportPrivateUsage=false

import logging
import math
import re
import statistics
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypeVar, cast

from art.core.gather import gather_in
from art.core.model import TrainableModel
from art.errors import ArtError
from art.estimates import Estimate, estimate_differences, estimate_rewards
from art.pool import DEFAULT_MAX_CONCURRENT_ROLLOUTS, DEFAULT_MAX_EXCEPTIONS, RolloutPool
from art.trajectories import Trajectory, TrajectoryGroup, to_trajectory
from art_protocol.sampling import seeds_from
from art_protocol.signal import to_finite
from art_protocol.wire import NAME_PATTERN, NAME_RULE

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=TrainableModel)
S = TypeVar("S")
T = TypeVar("T")
Step: TypeAlias = int | Literal["base"]
Result: TypeAlias = Trajectory | Exception


@dataclass(frozen=True, slots=True, repr=False)
class Evaluation:
    """The result of `art.evaluate` at one step, and its comparison with the baseline."""

    name: str
    """The name under which the rollouts sampled, for example "demo/agent@30"."""
    step: int | None
    """None: the base model."""
    reward: Estimate
    """The mean over scenarios. A scenario's value is the mean over its repetitions, which are not independent."""
    scenario_rewards: tuple[float | None, ...]
    """The mean reward of each scenario, in order; None if all its rollouts failed."""
    num_rollouts: int
    num_failed: int
    """Failed rollouts have no reward and are in no mean."""
    metrics: dict[str, float]
    """The mean of each metric of the trajectories, over scenarios as for the reward."""
    groups: list[TrajectoryGroup] = field(compare=False)
    """The trajectories, one group for each scenario, with failed rollouts in `exceptions`."""
    baseline: "Evaluation | None" = None
    difference: Estimate | None = None
    """The mean over scenarios of the reward minus the baseline's reward. A scenario's value is the mean over pairs of
    rollouts with the same repetition."""
    num_unpaired: int = 0
    """Pairs that are not in `difference`, because a rollout of the pair failed."""

    def __repr__(self) -> str:
        parts = [_line(self)]
        if self.baseline is not None:
            left_out = f", {self.num_unpaired} left out" if self.num_unpaired else ""
            parts += [_line(self.baseline), f"difference {self.difference}{left_out}"]
        return f"Evaluation({'; '.join(parts)})"


def _line(evaluation: Evaluation) -> str:
    text = f"{evaluation.name}: reward {evaluation.reward}"
    if not evaluation.num_failed:
        return text
    return f"{text}, {evaluation.num_failed} of {evaluation.num_rollouts} rollouts failed"


async def evaluate(
    model: M,
    rollout: Callable[[M, S], Awaitable[Trajectory]],
    scenarios: Iterable[S],
    *,
    step: Step | None = None,
    baseline: Step | None = None,
    reps: int = 1,
    seed: int | None = None,
    split: str = "val",
    log: bool = True,
    max_exceptions: float = DEFAULT_MAX_EXCEPTIONS,
    max_concurrent_rollouts: int = DEFAULT_MAX_CONCURRENT_ROLLOUTS,
    pbar_desc: str | None = "evaluate",
) -> Evaluation:
    """The mean reward of `reps` rollouts of each scenario at a step, with its standard error and 95% interval.

    `step` is a step's number, "base" for the base model, or None for the step that is the newest when the call begins.
    With a `baseline`, a number or "base", each rollout has a partner at the baseline, and `difference` compares the pairs. The
    progress bar then has the means of both ("reward@30=0.81, reward@0=0.52").

    The means go to the history of each evaluated step, as `split`/reward, `split`/reward_standard_error, `split`/num_scenarios and
    `split`/METRIC, with the trajectories, unless `log` is False. A later evaluation of the step replaces them. The base model has no history. If the history cannot be
    written, the result is returned with a warning.

    `max_exceptions` is the count of failed rollouts that are tolerated (an int), or their share (a float up to 1.0, which
    tolerates all). `math.inf` tolerates all and warns of none, for a caller that reads `num_failed`.

    Raises:
        ValueError: an argument is out of range, or the model is not registered.
        Exception: the first failure of a rollout, if too many rollouts failed, or if no rollout succeeded.
    """
    cases = list(scenarios)
    _check(cases, reps, {"step": step, "baseline": baseline}, split)
    model.openai_client()  # made before the copies, so that all copies share the client's connections
    newest = await model.get_step() if step is None else step
    steps = [_to_number(newest)] if baseline is None else [_to_number(newest), _to_number(baseline)]
    of_failed = None if max_exceptions == math.inf else "They have no reward and are in no mean"
    limits: dict[str, Any] = {"max_exceptions": max_exceptions, "max_concurrent": max_concurrent_rollouts}
    pool = RolloutPool(desc=pbar_desc, of_failed=of_failed, **limits)
    labels = [""] if baseline is None else ["@base" if number is None else f"@{number}" for number in steps]
    results: list[Result] = await gather_in(pool, _make_rollouts(model, rollout, cases, steps, reps, seed), labels)
    evaluation = _summarise(model, steps, results, reps)
    # In this order: the first log call also writes what rollouts counted themselves, such as costs.
    for name, result in (("result", evaluation), ("result.baseline", evaluation.baseline)):
        if log and result is not None and result.step is not None:
            await log_evaluation(model, result, result.step, split, name)
    return evaluation


def _to_number(step: Step) -> int | None:
    """The step's number; None for the base model."""
    return None if step == "base" else step


async def log_evaluation(
    model: TrainableModel, evaluation: Evaluation, step: int, split: str, name: str = "result"
) -> None:
    """Writes an evaluation to the history. A failure is a warning, so that the rollouts are not lost. `name` is the name of
    the evaluation in the caller's program."""
    try:
        row = _history_row(evaluation, split)
        await model.log(evaluation.groups, split, step=step, metrics=row)
    except (ArtError, ValueError) as error:
        logger.warning(
            "evaluate: %s is not in the history (%s). The result has all its rollouts; to write them later, call "
            "model.log(%s.groups, %r, step=%d)",
            evaluation.name,
            error,
            name,
            split,
            step,
        )


def _make_rollouts(
    model: M,
    rollout: Callable[[M, S], Awaitable[Trajectory]],
    cases: Sequence[S],
    steps: Sequence[int | None],
    reps: int,
    seed: int | None,
) -> Iterator[Awaitable[Trajectory]]:
    """Rollouts of all scenarios. Partners follow each other, so that they sample under the same load."""
    for index, case in enumerate(cases):
        for repetition in range(reps):
            for step in steps:
                seeds = None if seed is None else seeds_from(f"{seed} {index} {repetition}")
                pinned = model._pinned(step, seeds)
                yield _play(rollout, pinned, case)


def _check(cases: Sequence[object], reps: int, steps: Mapping[str, object], split: str) -> None:
    if not cases:
        raise ValueError("there is nothing to evaluate: `scenarios` is empty")
    if reps < 1:
        raise ValueError(f"reps must be at least 1, not {reps}")
    for name, step in steps.items():
        is_step = isinstance(step, int) and not isinstance(step, bool) and step >= 0
        if not (is_step or step in (None, "base")):
            raise ValueError(f"{name} {step!r} is not a step: pass its number, or 'base'")
    if not re.fullmatch(NAME_PATTERN, split):
        raise ValueError(f"split {split!r} becomes a folder: {NAME_RULE}")


async def _play(rollout: Callable[[M, S], Awaitable[Trajectory]], model: M, scenario: S) -> Trajectory:
    """The rollout's trajectory.

    Raises:
        ValueError: the reward or a metric is not a finite number, or another step of the model sampled.
    """
    trajectory = to_trajectory(await rollout(model, scenario))
    numbers: dict[str, Any] = {**trajectory.metrics, "reward": trajectory.reward}
    for name, value in numbers.items():  # Any: a program may have set anything
        if to_finite(value) is None:
            raise ValueError(f"a rollout returned {name}={value!r}: use a finite number")
    _check_sampler(trajectory, model)
    return trajectory


def _check_sampler(trajectory: Trajectory, model: TrainableModel) -> None:
    """Raises ValueError for a choice that another step of the same model sampled: a rollout can use the model by a variable
    of the program, instead of the copy that it gets."""
    model_id, name = f"{model.project}/{model._storage_name}", model.get_inference_name()
    for history in (trajectory, *trajectory.additional_histories):
        for entry in history.messages_and_choices:
            fields = entry if isinstance(entry, dict) else entry.model_extra or {}
            mark = cast(dict[str, Any], fields.get("art") or {})  # Any: JSON of the server
            sampler = f"{mark.get('model')}@{mark.get('step')}"
            if mark.get("model") == model_id and sampler != name:
                raise ValueError(
                    f"a rollout sampled from {sampler}, not from {name}: use the model that the rollout gets, and no "
                    "other variable"
                )


def _summarise(model: TrainableModel, steps: Sequence[int | None], results: Sequence[Result], reps: int) -> Evaluation:
    """The evaluation of the first step; a second step is the baseline. The results of partners follow each other."""
    evaluation = _evaluation(model, steps[0], results[:: len(steps)], reps)
    if len(steps) == 1:
        return evaluation
    baseline = _evaluation(model, steps[1], results[1::2], reps)
    differences: list[float | None] = []
    for result, partner in zip(results[::2], results[1::2], strict=True):
        if isinstance(result, Trajectory) and isinstance(partner, Trajectory):
            differences.append(float(result.reward) - float(partner.reward))
        else:
            differences.append(None)
    means = _scenario_means(differences, reps)
    if not any(mean is not None for mean in means):
        raise _first_failure(results, "in each pair a rollout failed, so no pair can be compared")
    rewards = [float(result.reward) for result in results if isinstance(result, Trajectory)]
    return replace(
        evaluation,
        baseline=baseline,
        difference=estimate_differences(_known(means), rewards),
        num_unpaired=differences.count(None),
    )


def _evaluation(model: TrainableModel, step: int | None, results: Sequence[Result], reps: int) -> Evaluation:
    rewards = [float(result.reward) if isinstance(result, Trajectory) else None for result in results]
    means = _scenario_means(rewards, reps)
    if not any(mean is not None for mean in means):
        raise _first_failure(results, "no rollout succeeded, so there is no mean reward")
    groups = [
        TrajectoryGroup(scenario_results, metadata=_common_metadata(scenario_results))
        for scenario_results in _by_scenario(results, reps)
    ]
    return Evaluation(
        name=model._pinned(step).get_inference_name(),
        step=step,
        reward=estimate_rewards(_known(means)),
        scenario_rewards=tuple(means),
        num_rollouts=len(results),
        num_failed=rewards.count(None),
        metrics=_metric_means(groups),
        groups=groups,
    )


def _common_metadata(results: Iterable[Result]) -> dict[str, Any]:
    """The metadata that all trajectories of a scenario have in common, such as the scenario's id."""
    rows = [result.metadata for result in results if isinstance(result, Trajectory)]
    first = rows[0] if rows else {}
    return {
        name: value
        for name, value in first.items()
        if isinstance(value, str | int | float) and all(row.get(name) == value for row in rows)
    }


def _metric_means(groups: Iterable[TrajectoryGroup]) -> dict[str, float]:
    """For each metric the mean over scenarios, where a scenario's value is the mean over its trajectories."""
    scenario_means: dict[str, list[float]] = {}
    for group in groups:
        for name in dict.fromkeys(name for trajectory in group for name in trajectory.metrics):
            values = [float(trajectory.metrics[name]) for trajectory in group if name in trajectory.metrics]
            scenario_means.setdefault(name, []).append(statistics.fmean(values))
    return {name: statistics.fmean(means) for name, means in scenario_means.items()}


def _history_row(evaluation: Evaluation, split: str) -> dict[str, float]:
    reward = evaluation.reward
    means = {**evaluation.metrics, "reward": reward.mean, "num_scenarios": float(reward.num_scenarios)}
    if math.isfinite(reward.standard_error):
        means["reward_standard_error"] = reward.standard_error
    return {f"{split}/{name}": mean for name, mean in means.items()}


def _by_scenario(values: Sequence[T], reps: int) -> list[Sequence[T]]:
    return [values[first : first + reps] for first in range(0, len(values), reps)]


def _scenario_means(values: Sequence[float | None], reps: int) -> list[float | None]:
    """Each scenario's mean over its known values; None if no value is known."""
    means: list[float | None] = []
    for scenario_values in _by_scenario(values, reps):
        known = [value for value in scenario_values if value is not None]
        means.append(statistics.fmean(known) if known else None)
    return means


def _known(means: Iterable[float | None]) -> list[float]:
    return [mean for mean in means if mean is not None]


def _first_failure(results: Iterable[Result], note: str) -> Exception:
    failure = next(result for result in results if isinstance(result, Exception))
    failure.add_note(note)
    return failure
