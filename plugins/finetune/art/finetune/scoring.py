"""Rewards: what an evaluator returns, the built-in evaluators, and several of them with weights.

A failure is never a reward. An evaluator that raises, or returns None, NaN or something that is no score, fails the rollout.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import art
from art.finetune import components
from art.finetune.rows import Row
from art.finetune.sections import Component, Config, RewardFunction

SCORE_FIELDS = frozenset({"score", "turn_rewards", "metrics"})


@dataclass(frozen=True, slots=True)
class Score:
    """What an evaluator found."""

    score: float
    turn_rewards: list[float | None] | None = None
    """For each of the trajectory's answers a reward of its own, or None."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])


class Evaluator(Protocol):
    async def __call__(self, row: Row, output: Any, trajectory: art.Trajectory) -> Score: ...


class FunctionEvaluator:
    """A function of `row` (with all its columns), `output` and `trajectory`, in any selection; async or plain."""

    def __init__(self, name: str, given: Callable[..., Any]) -> None:
        self._name, self._function = name, given
        self._parameters = list(inspect.signature(given).parameters)

    async def __call__(self, row: Row, output: Any, trajectory: art.Trajectory) -> Score:
        known = {"row": dict(row.columns), "output": output, "trajectory": trajectory}
        result = self._function(**{name: known[name] for name in self._parameters if name in known})
        if inspect.isawaitable(result):
            result = await result
        return to_score(self._name, result)


class BuiltIn:
    """One of `art.rewards`, applied to the output and the row's answer."""

    def __init__(self, name: str, section: Component) -> None:
        self._name, self._options = section.type, section.fields()
        self._shown = name

    async def __call__(self, row: Row, output: Any, trajectory: art.Trajectory) -> Score:
        text, options = None if output is None else str(output), dict(self._options)
        if self._name == "json_match":
            return to_score(self._shown, art.rewards.json_match(text, options.get("schema")))
        wanted: Any = options.pop("pattern", row.answer) if self._name == "regex_match" else row.answer
        if wanted is None:
            raise ValueError(f"evaluator {self._shown!r}: the row has no answer to compare with")
        if self._name == "number_match":
            wanted = float(wanted)
        elif self._name == "exact_match":
            wanted = str(wanted)
        return to_score(self._shown, getattr(art.rewards, self._name)(text, wanted, **options))


def to_score(name: str, result: object) -> Score:
    """What an evaluator returned, as a score.

    Raises:
        ValueError: it is neither a finite number nor a bool nor `{score, turn_rewards, metrics}`.
    """
    if isinstance(result, Mapping):
        fields = dict(cast("Mapping[str, Any]", result))
        if unknown := fields.keys() - SCORE_FIELDS:
            raise ValueError(
                f"evaluator {name!r} returned {min(unknown)!r}: allowed are {', '.join(sorted(SCORE_FIELDS))}"
            )
        number = _finite(name, fields.get("score"))
        metrics: Mapping[str, Any] = fields.get("metrics") or {}
        turns = fields.get("turn_rewards")
        return Score(
            number,
            None if turns is None else [None if each is None else _finite(name, each) for each in turns],
            {metric: _finite(name, value) for metric, value in metrics.items()},
        )
    return Score(_finite(name, result))


def _finite(name: str, value: Any) -> float:  # Any: an evaluator may return anything
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, str) or not math.isfinite(number):
        raise ValueError(f"evaluator {name!r} returned {value!r}: a score is a finite number or a bool")
    return number


class Reward:
    """The reward function of a file: one evaluator, or several with weights. The toolkit's come from `made`."""

    def __init__(self, config: Config, reward: RewardFunction, made: Mapping[str, Evaluator]) -> None:
        self._weights = reward.weights or {str(reward.name): 1.0}
        self._is_sum = reward.weights is not None
        self._evaluators: dict[str, Evaluator] = {}
        self._ruler: Component | None = None
        for name in self._weights:
            section = config.eval.evaluators[name]
            if section.type == "ruler":
                self._ruler, self._ruler_name = section, name
            else:
                self._evaluators[name] = made.get(name) or make_evaluator(name, section)

    @property
    def is_of_groups(self) -> bool:
        """Whether a part of it compares the rollouts of a group."""
        return self._ruler is not None

    async def score(self, row: Row, output: Any, trajectory: art.Trajectory) -> None:
        """Sets reward, turn rewards and metrics of a trajectory.

        Raises:
            Exception: an evaluator failed.
        """
        parts: dict[str, float] = {}
        for name, evaluator in self._evaluators.items():
            found = await evaluator(row, output, trajectory)
            parts[name] = found.score
            trajectory.metrics.update(found.metrics)
            if found.turn_rewards is not None:
                trajectory.turn_rewards = found.turn_rewards
        self._set(trajectory, parts)

    async def score_group(self, group: art.TrajectoryGroup) -> art.TrajectoryGroup:
        """The group with the scores of its comparison; its failure fails the group.

        Raises:
            Exception: the judge failed.
        """
        if self._ruler is None:
            return group
        options = self._ruler.fields()
        judge = {name: options.pop(name) for name in ("base_url", "api_key") if name in options}
        with art.no_capture():
            scored: art.TrajectoryGroup = await art.rewards.ruler_score_group(
                group, extra_litellm_params=judge, **options
            )
        for old, new in zip(group, scored, strict=True):
            known = {name: old.metrics[f"reward/{name}"] for name in self._evaluators if self._is_sum}
            self._set(new, known | {self._ruler_name: new.reward})
        return scored

    def _set(self, trajectory: art.Trajectory, parts: dict[str, float]) -> None:
        if self._is_sum:
            art.rewards.set_reward(trajectory, parts, {name: self._weights[name] for name in parts})
        else:
            trajectory.reward = next(iter(parts.values()), 0.0)


def make_evaluator(name: str, section: Component) -> Evaluator:
    """An evaluator of a file.

    Raises:
        ValueError: its module cannot be imported.
    """
    if section.type in components.BUILT_IN["evaluator"]:
        return BuiltIn(name, section)
    return FunctionEvaluator(name, components.load("evaluator", section.type))
