"""Rewards: a Python function, a built-in evaluator, or several of them with weights.

A failure is never a reward. An evaluator fails the rollout if it raises, or returns None, NaN or anything else that is no score.
"""

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeAlias, TypeVar, cast

import art
from art.finetune import components, workflows
from art.finetune.errors import RolloutFailed
from art.finetune.limits import TimeUp, limited
from art.finetune.programs import run_program, words_of
from art.finetune.reading import described, nearest
from art.finetune.rows import DatasetRow
from art.finetune.sections import Component, Config, RewardFunction

SCORE_FIELDS = frozenset({"score", "turn_rewards", "metrics", "reason"})

WITHOUT_ANSWER = ("command", "judge", "ruler")
"""Built-in evaluators that need no answer of the row."""

MAX_PROBLEMS = 5
"""Rows that an error lists."""

JUDGE_MODEL = "openai/o3"
JUDGE_ELSEWHERE = (
    "The address of a judge elsewhere is base_url of the evaluator (without a file: --judge_url http://HOST/v1)"
)
OPENAI_URL = "https://api.openai.com/v1"
JUDGE_SECONDS, RULER_SECONDS, JUDGE_RETRIES = 60.0, 600.0, 2
"""The default limits of a request to a judge and to a ruler's judge, which reads whole groups, and how often a failed request is
repeated."""

T = TypeVar("T")
Evaluator: TypeAlias = Callable[[DatasetRow, Any, art.Trajectory], Coroutine[Any, Any, Any]]
"""From a row, the output and the trajectory to a number, a bool, or `{score, turn_rewards, metrics, reason}`."""


class Reward:
    """The reward function of a file: one evaluator, or several with weights. `evaluators` has those that are not built in."""

    def __init__(self, config: Config, reward: RewardFunction, evaluators: Mapping[str, Evaluator]) -> None:
        self._weights = reward.weights
        self.kinds = ", ".join(config.eval.evaluators[name].type for name in reward.names)
        """The `_type` of each evaluator."""
        self._evaluators: dict[str, Evaluator] = {}
        self._ruler = ""
        self._judges: dict[str, dict[str, Any]] = {}
        self._num_containing = 0
        """Outputs without a reward that contain the row's answer, since the last `take_hint`."""
        self._timeout_seconds = config.eval.general.rollout_timeout_seconds
        for name in reward.names:
            section = config.eval.evaluators[name]
            if section.type == "ruler":
                self._ruler, self._ruler_options = name, section.fields()
            elif section.type == "command":
                self._evaluators[name] = program_of(section.fields()["command"])
            elif section.type == "judge":
                self._judges[name] = section.fields()
                self._evaluators[name] = judge_of(section.fields())
            else:
                self._evaluators[name] = evaluators.get(name) or _built_in(section.type, section.fields())

    @property
    def is_of_groups(self) -> bool:
        """Whether an evaluator of this reward compares the rollouts of a group."""
        return bool(self._ruler)

    async def score(self, row: DatasetRow, output: Any, trajectory: art.Trajectory) -> dict[str, str]:
        """Sets reward, turn rewards and metrics of a trajectory. Returns the reasons of evaluators that have one.

        Raises:
            Exception: an evaluator failed.
        """
        parts, reasons = dict[str, float](), dict[str, str]()
        for name, evaluator in self._evaluators.items():
            result = await self._limited(name, evaluator(row, output, trajectory))
            fields = dict(cast("Mapping[str, Any]", result)) if isinstance(result, Mapping) else {"score": result}
            if unknown := fields.keys() - SCORE_FIELDS:
                raise ValueError(
                    f"evaluator {name!r} returned {min(unknown)!r}: allowed are {', '.join(sorted(SCORE_FIELDS))}"
                )
            parts[name] = finite(f"evaluator {name!r}", fields.get("score"))
            metrics: Mapping[str, Any] = fields.get("metrics") or {}
            trajectory.metrics.update(
                {metric: finite(f"evaluator {name!r}", value) for metric, value in metrics.items()}
            )
            if (turn_rewards := fields.get("turn_rewards")) is not None:
                trajectory.turn_rewards = [
                    None if reward is None else finite(f"evaluator {name!r}", reward) for reward in turn_rewards
                ]
            if fields.get("reason") is not None:
                reasons[name] = str(fields["reason"])
        self._set(trajectory, parts)
        self._num_containing += trajectory.reward == 0.0 and _contains_answer(output, row.answer)
        return reasons

    def take_hint(self, rewards: Sequence[float | None]) -> str | None:
        """What is wrong if the rewards since the last call are all 0, and outputs contain the row's answer; else None."""
        num_containing, self._num_containing = self._num_containing, 0
        if not num_containing or any(rewards):
            return None
        return (
            f"every reward is 0, and {num_containing} outputs contain the row's answer: exact_match and regex_match compare the "
            "whole output; the evaluator `contains` does not"
        )

    def judge_prompts(self, row: DatasetRow, output: Any) -> dict[str, str]:
        """The prompts of the judges for an output, by evaluator."""
        prompts: dict[str, str] = {}
        for name, options in self._judges.items():
            messages = art.rewards.grading_prompt(*_graded(row, output, options))
            prompts[name] = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
        return prompts

    async def score_group(self, group: art.TrajectoryGroup) -> art.TrajectoryGroup:
        """The group with the scores of its comparison. A failed comparison fails the group.

        Raises:
            Exception: the judge failed.
        """
        options = dict(self._ruler_options)
        seconds = options.pop("timeout_seconds", RULER_SECONDS)
        judge = judge_address(options) | {"timeout": seconds, "max_retries": JUDGE_RETRIES} | _body_of(options)
        options = {name: value for name, value in options.items() if name not in judge}
        with art.no_capture(), _told_slow(seconds):
            judging = art.rewards.ruler_score_group(group, extra_litellm_params=judge, **options)
            scored = await self._limited(self._ruler, judging)
        if scored is None:
            raise RuntimeError("the judge failed, and swallow_exceptions hides the reason")
        for trajectory in scored:
            known = {name: trajectory.metrics[f"reward/{name}"] for name in self._evaluators}
            self._set(trajectory, known | {self._ruler: trajectory.reward})
        return scored

    async def _limited(self, name: str, work: Coroutine[Any, Any, T]) -> T:
        """The result of an evaluator. An evaluator has as much time as a rollout."""
        try:
            return await limited(work, self._timeout_seconds)
        except TimeUp as error:
            raise RolloutFailed(
                f"evaluator {name!r} took {error}: raise eval.general.rollout_timeout_seconds"
            ) from error

    def _set(self, trajectory: art.Trajectory, parts: dict[str, float]) -> None:
        if self._weights is None:
            trajectory.reward = sum(parts.values())  # a single part, or no part before the ruler's comparison
        else:
            art.rewards.set_reward(trajectory, parts, {name: self._weights[name] for name in parts})


def finite(what: str, value: Any) -> float:  # Any: a user's code may return anything
    """A score, which is a finite number or a bool.

    Raises:
        ValueError: the value is something else.
    """
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{what} returned {value!r}: a score is a finite number or a bool")
    return number


def evaluator_of(user_function: Callable[..., Any]) -> Evaluator:
    """The evaluator of a user's function."""

    async def evaluate(row: DatasetRow, output: Any, trajectory: art.Trajectory) -> Any:
        arguments = {"row": dict(row.columns), "output": output, "trajectory": trajectory}
        return await components.call(user_function, arguments)

    return evaluate


def program_of(command: str | list[str]) -> Evaluator:
    """The evaluator that is a program. The program gets `row` and `output` as JSON on standard input, and prints a number, or JSON
    with the fields that a function returns."""
    words = words_of(command)

    async def evaluate(row: DatasetRow, output: Any, trajectory: art.Trajectory) -> Any:
        asked = {"row": row.columns, "output": output}
        printed = await run_program(words, asked, workflows.environment_of_user())
        try:
            return json.loads(printed)
        except ValueError as error:
            raise RolloutFailed(
                f"{words[0]} printed {printed[:80]!r}: an evaluator prints a number, or JSON such as "
                '{"score": 0.5, "reason": "..."}'
            ) from error

    return evaluate


def judge_of(options: Mapping[str, Any]) -> Evaluator:
    """The evaluator that asks a judge for the score of each output."""
    seconds = options.get("timeout_seconds", JUDGE_SECONDS)
    params = {"timeout": seconds, "max_retries": JUDGE_RETRIES} | _body_of(options)

    async def evaluate(row: DatasetRow, output: Any, trajectory: art.Trajectory) -> dict[str, Any]:
        model, address = options.get("judge_model", JUDGE_MODEL), judge_address(options)
        with _told_slow(seconds):
            verdict = await art.rewards.grade_answer(*_graded(row, output, options), model, {**address, **params})
        return {"score": verdict.score, "reason": verdict.explanation}

    return evaluate


@contextlib.contextmanager
def _told_slow(seconds: float) -> Generator[None]:
    """The error of a judge that took longer than `seconds` in the block has the remedy."""
    try:
        yield
    except art.rewards.JudgeTimeoutError as error:
        remedy = f"raise timeout_seconds of the evaluator ({seconds:g}), or use a faster judge"
        raise art.rewards.JudgeTimeoutError(f"{error}: {remedy}", retryable=True) from error


def _body_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an evaluator that are sent to the judge as they are."""
    return {name: options[name] for name in ("max_tokens",) if name in options}


def check_judge(options: Mapping[str, Any]) -> None:
    """Checks that the judge of an evaluator can be asked. Nothing is sent.

    Raises:
        ValueError: the judge has no key, or an address that cannot be used.
    """
    address = judge_address(options)
    try:
        art.rewards.Judge(options.get("judge_model", JUDGE_MODEL), **address)
    except ValueError as error:
        raise ValueError(f"{error}" if "base_url" in address else f"{error}. {JUDGE_ELSEWHERE}") from error


def _graded(row: DatasetRow, output: Any, options: Mapping[str, Any]) -> tuple[Any, Any, Any, str]:
    """What a judge grades, and by which rubric."""
    return row.messages or row.question, output, row.answer, options.get("rubric", art.rewards.GRADING_RUBRIC)


def judge_address(options: Mapping[str, Any]) -> dict[str, Any]:
    """The address and the key of a judge. A run sets OPENAI_BASE_URL and OPENAI_API_KEY to the policy's: a judge at OpenAI has
    the user's own values of both."""
    address = {name: options[name] for name in ("base_url", "api_key") if name in options}
    model = str(options.get("judge_model", JUDGE_MODEL))
    provider, _, rest = model.partition("/")
    if "base_url" in address or (rest and provider != "openai"):
        return address
    own = workflows.of_user or os.environ
    key = address.get("api_key") or own.get("OPENAI_API_KEY")
    if not key:
        raise ValueError(
            f"judge {model} needs a key: set OPENAI_API_KEY before the command starts, or api_key of the evaluator. "
            f"{JUDGE_ELSEWHERE}"
        )
    return {"base_url": own.get("OPENAI_BASE_URL") or OPENAI_URL, "api_key": key}


def _built_in(kind: str, options: dict[str, Any]) -> Evaluator:
    """A function of `art.rewards`, applied to the output and the row's answer."""

    async def evaluate(row: DatasetRow, output: Any, trajectory: art.Trajectory) -> float:
        return _judge(kind, options, output, row.answer)

    return evaluate


def _judge(kind: str, options: dict[str, Any], output: Any, answer: Any) -> float:
    """The score of an output.

    Raises:
        ValueError: no output can be compared with the answer.
    """
    text = _text(output)
    check: Callable[..., float] = getattr(art.rewards, kind)
    if kind == "json_match" or "pattern" in options:
        return check(text, **options)
    if answer is None:
        raise ValueError("is empty")
    if kind == "number_match":
        return check(text, _number(answer), **options)
    if isinstance(answer, str):
        return check(text, answer, **options)
    if kind == "contains":
        return check(text, json.dumps(answer, ensure_ascii=False, default=str), **options)
    if kind == "regex_match":
        # In a number a point is no wildcard.
        return check(text, re.escape(str(answer)) if isinstance(answer, int | float) else str(answer))
    return float(_is_equal_json(output, answer, **options))


def _contains_answer(output: Any, answer: Any) -> bool:
    wanted = (_text(answer) or "").strip().casefold()
    return bool(wanted) and wanted in (_text(output) or "").casefold()


def _text(output: Any) -> str | None:
    """An output as text. A mapping or a list becomes JSON."""
    if output is None or isinstance(output, str):
        return output
    return json.dumps(output, ensure_ascii=False, default=str) if isinstance(output, dict | list) else str(output)


def _number(answer: Any) -> float | str:
    if isinstance(answer, bool) or not isinstance(answer, int | float | Decimal | str):
        raise ValueError(f"{described(answer)} is no number")
    try:
        return answer if isinstance(answer, str) else float(answer)
    except OverflowError as error:
        raise ValueError("a number above 1e308 cannot be compared") from error


def _is_equal_json(output: Any, answer: Any, *, ignore_case: bool = False) -> bool:
    """Whether an output is JSON of the same value: 1 equals 1.0, and true is not 1. A text is parsed."""

    def fold(text: str) -> str:
        return text.casefold() if ignore_case else text

    wanted = json.loads(fold(json.dumps(answer, ensure_ascii=False, default=str, allow_nan=False)))
    try:
        text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False, default=str)
        return _equal(json.loads(fold(text)), wanted)
    except (ValueError, RecursionError):
        return False


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        left, right = cast("dict[str, Any]", one), cast("dict[str, Any]", other)
        return left.keys() == right.keys() and all(_equal(left[name], right[name]) for name in left)
    if isinstance(one, list) and isinstance(other, list):
        pairs = zip(cast("list[Any]", one), cast("list[Any]", other), strict=False)
        return len(cast("list[Any]", one)) == len(cast("list[Any]", other)) and all(_equal(*pair) for pair in pairs)
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def _lacking_column(name: str, section: Component, rows: Sequence[DatasetRow], column: str) -> str | None:
    """The problem of rows that all lack the column of answers, with the flag that names another column; None if some row has the
    column, or the evaluator needs none."""
    columns = list(dict.fromkeys(key for row in rows for key in row.columns))
    if not rows or column in columns or any(row.answer is not None for row in rows) or not _needs_answer(section):
        return None
    others = [key for key in columns if key not in ("id", "question")]
    meant = nearest(column, others) or (others[0] if len(others) == 1 else "COLUMN")
    shown = ", ".join(columns)
    return f"no column {column!r}, which evaluator {name!r} ({section.type}) compares; columns are {shown}; --answer_key {meant}"


def _needs_answer(section: Component) -> bool:
    return section.type != "json_match" and "pattern" not in section.fields()


def rows_that_cannot_be_judged(
    config: Config, reward: RewardFunction, rows: Sequence[DatasetRow], column: str
) -> list[str]:
    """A line for each row whose answer a built-in evaluator cannot compare with any output. After `MAX_PROBLEMS` lines comes the
    number of the other rows."""
    problems: list[str] = []
    for name in reward.names:
        section = config.eval.evaluators[name]
        if section.type not in components.BUILT_IN["evaluator"] or section.type in WITHOUT_ANSWER:
            continue
        if lacking := _lacking_column(name, section, rows, column):
            problems.append(lacking)
            continue
        for row in rows:
            try:
                _judge(section.type, section.fields(), "", row.answer)
            except (ValueError, re.error) as error:
                problems.append(
                    f"{row.location}, column {column!r}: evaluator {name!r} ({section.type}) cannot use it: {error}"
                )
    if len(problems) > MAX_PROBLEMS:
        problems = [*problems[:MAX_PROBLEMS], f"{len(problems) - MAX_PROBLEMS} more rows cannot be judged"]
    return problems
