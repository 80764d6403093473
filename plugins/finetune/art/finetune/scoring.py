"""Rewards: a Python function, a built-in evaluator, or several of them with weights.

A failure is never a reward. An evaluator that raises, or returns None, NaN or something that is no score, fails the rollout.
"""

import functools
import inspect
import math
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeAlias, TypeVar, cast

import art
from art.finetune import components
from art.finetune.errors import RolloutFailed
from art.finetune.limits import TimeUp, in_thread, limited
from art.finetune.rows import Row
from art.finetune.sections import Component, Config, RewardFunction

SCORE_FIELDS = frozenset({"score", "turn_rewards", "metrics"})

T = TypeVar("T")
Evaluator: TypeAlias = Callable[[Row, Any, art.Trajectory], Coroutine[Any, Any, Any]]
"""Of a row, the output and the trajectory: a number, a bool, or `{score, turn_rewards, metrics}`."""


class Reward:
    """The reward function of a file: one evaluator, or several with weights. The toolkit's come from `made`.

    Raises:
        ValueError: an evaluator's module cannot be imported.
    """

    def __init__(self, config: Config, reward: RewardFunction, made: Mapping[str, Evaluator]) -> None:
        self._weights = reward.weights
        self._evaluators: dict[str, Evaluator] = {}
        self._ruler = ""
        self._timeout_seconds = config.eval.general.rollout_timeout_seconds
        for name in reward.weights or [str(reward.name)]:
            section = config.eval.evaluators[name]
            if section.type == "ruler":
                self._ruler, self._ruler_options = name, section.fields()
            else:
                self._evaluators[name] = made.get(name) or _make_evaluator(name, section)

    @property
    def is_of_groups(self) -> bool:
        """Whether a part of it compares the rollouts of a group."""
        return bool(self._ruler)

    async def score(self, row: Row, output: Any, trajectory: art.Trajectory) -> None:
        """Sets reward, turn rewards and metrics of a trajectory.

        Raises:
            Exception: an evaluator failed.
        """
        parts: dict[str, float] = {}
        for name, evaluator in self._evaluators.items():
            found = await self._limited(name, evaluator(row, output, trajectory))
            fields = dict(cast("Mapping[str, Any]", found)) if isinstance(found, Mapping) else {"score": found}
            if unknown := fields.keys() - SCORE_FIELDS:
                raise ValueError(
                    f"evaluator {name!r} returned {min(unknown)!r}: allowed are {', '.join(sorted(SCORE_FIELDS))}"
                )
            parts[name] = _finite(name, fields.get("score"))
            metrics: Mapping[str, Any] = fields.get("metrics") or {}
            trajectory.metrics.update({metric: _finite(name, value) for metric, value in metrics.items()})
            if (turns := fields.get("turn_rewards")) is not None:
                trajectory.turn_rewards = [None if each is None else _finite(name, each) for each in turns]
        self._set(trajectory, parts)

    async def score_group(self, group: art.TrajectoryGroup) -> art.TrajectoryGroup:
        """The group with the scores of its comparison; its failure fails the group.

        Raises:
            Exception: the judge failed.
        """
        options = dict(self._ruler_options)
        judge = {name: options.pop(name) for name in ("base_url", "api_key") if name in options}
        with art.no_capture():
            judging = art.rewards.ruler_score_group(group, extra_litellm_params=judge, **options)
            scored: art.TrajectoryGroup = await self._limited(self._ruler, judging)
        for each in scored:
            known = {name: each.metrics[f"reward/{name}"] for name in self._evaluators}
            self._set(each, known | {self._ruler: each.reward})
        return scored

    async def _limited(self, name: str, work: Coroutine[Any, Any, T]) -> T:
        """The result of an evaluator, which has as much time as a rollout."""
        try:
            return await limited(work, self._timeout_seconds)
        except TimeUp as error:
            raise RolloutFailed(
                f"evaluator {name!r} took {error}: raise eval.general.rollout_timeout_seconds"
            ) from error

    def _set(self, trajectory: art.Trajectory, parts: dict[str, float]) -> None:
        if self._weights is None:
            trajectory.reward = sum(parts.values())  # one part, or none before the comparison
        else:
            art.rewards.set_reward(trajectory, parts, {name: self._weights[name] for name in parts})


def _finite(name: str, value: Any) -> float:  # Any: an evaluator may return anything
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"evaluator {name!r} returned {value!r}: a score is a finite number or a bool")
    return number


def _make_evaluator(name: str, section: Component) -> Evaluator:
    if section.type in components.BUILT_IN["evaluator"]:
        return _built_in(name, section.type, section.fields())
    given = components.load("evaluator", section.type)
    parameters = list(inspect.signature(given).parameters)
    is_async = components.is_async(given)

    async def evaluate(row: Row, output: Any, trajectory: art.Trajectory) -> Any:
        known = {"row": dict(row.columns), "output": output, "trajectory": trajectory}
        call = functools.partial(given, **{name: known[name] for name in parameters if name in known})
        result = call() if is_async else await in_thread(call)
        return await result if inspect.isawaitable(result) else result

    return evaluate


def _built_in(name: str, kind: str, options: dict[str, Any]) -> Evaluator:
    """One of `art.rewards`, applied to the output and the row's answer."""
    check: Callable[..., float] = getattr(art.rewards, kind)

    async def evaluate(row: Row, output: Any, trajectory: art.Trajectory) -> float:
        text = None if output is None else str(output)
        if kind == "json_match" or "pattern" in options:
            return check(text, **options)
        if row.answer is None:
            raise ValueError(f"evaluator {name!r}: the row has no answer to compare with")
        return check(text, float(row.answer) if kind == "number_match" else str(row.answer), **options)

    return evaluate
