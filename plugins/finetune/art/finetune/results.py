"""The rollouts of an evaluation as lines of JSON: ids, answers, rewards and reasons. `differences` compares two such files."""

import json
import statistics
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

import art
from art.contained import contained
from art.estimates import Estimate, estimate_rewards
from art.files import write_whole
from art.finetune.agent import Agent, line_of_failure, reason_of, seed_of
from art.finetune.errors import BelowTarget, WrongInput
from art.finetune.losing import is_lost
from art.finetune.reading import read_text
from art.finetune.rows import DatasetRow


class ResultRecord(BaseModel):
    """A rollout of an evaluation. Other fields, such as `label`, may be added by hand."""

    model_config = ConfigDict(frozen=True, extra="allow")

    model: str
    """The name under which the rollout sampled, with the step: "demo/agent@3"."""
    id: str
    """The id of the row."""
    dataset: str = ""
    """The data set of the row: its file, its function or its name on the hub."""
    evaluators: str = ""
    """The `_type` of each evaluator of the reward."""
    repetition: int = 1
    session: str = ""
    """The rollout's session on the server: `art show MODEL --session SESSION` shows the requests."""
    seed: int | None = None
    """The seed of the rollout, which a workflow gets as `seed`."""
    question: str = ""
    answer: Any = None
    """The row's right answer, if the row has one."""
    output: Any = None
    """What the workflow returned."""
    reward: float | None = None
    """None: the rollout failed."""
    metrics: dict[str, float | int | bool] = {}
    reasons: dict[str, str] = {}
    """Why evaluators gave their scores, by evaluator."""
    error: str | None = None
    """Why the rollout failed, with the line of the user's code that raised."""


class Recorder:
    """The rollout function of an evaluation, which keeps a record of each rollout. The repetitions of a row have different seeds;
    the same repetition at another step has the same seed."""

    def __init__(self, agent: Agent, session: str, seed: int, dataset: str) -> None:
        self._agent, self._session, self._seed, self._dataset = agent, session, seed, dataset
        self._counts = Counter[tuple[str, str]]()
        self.records: list[ResultRecord] = []
        self.lost: Exception | None = None
        """The first failure after which the server did not answer. Later rollouts end with this failure at once."""

    async def play(self, model: art.TrainableModel, row: DatasetRow) -> art.Trajectory:
        case = model.get_inference_name(), row.id
        self._counts[case] += 1
        number, name = self._counts[case], case[0]
        session, seed = f"{self._session}-{uuid.uuid4().hex[:12]}", seed_of(self._seed, "val", row.id, number)
        record = ResultRecord(
            model=name,
            id=row.id,
            dataset=self._dataset,
            evaluators=self._agent.reward.kinds,
            repetition=number,
            session=session,
            seed=seed,
            question=row.question,
            answer=row.answer,
        )
        output = None
        if self.lost is not None:
            raise self.lost
        try:
            with contained("the rollout"):
                trajectory, output = await self._agent.roll_out(model, row, session, seed)
                reasons = await self._agent.reward.score(row, output, trajectory)
        except Exception as error:  # of any kind: it is the user's code
            reason = f"{reason_of(error)}{line_of_failure(error)}"
            self.records.append(record.model_copy(update={"output": output, "error": reason}))
            if await is_lost(model):
                self.lost = error
            error.add_note(f"row {row.id!r}")
            raise
        fields = {"output": output, "reward": trajectory.reward, "metrics": trajectory.metrics, "reasons": reasons}
        self.records.append(record.model_copy(update=fields))
        return trajectory


def write_results(path: Path, records: Sequence[ResultRecord], rows: Sequence[DatasetRow]) -> str:
    """Writes the records: one model after the other, in the order of the rows. Returns a line with the file, and with what is
    replaced if the file has results of another model, data set or reward.

    Raises:
        WrongInput: the file cannot be written.
    """
    rows_in_order = {row.id: number for number, row in enumerate(rows)}
    models = list(dict.fromkeys(record.model for record in records))
    ordered = sorted(
        records, key=lambda record: (models.index(record.model), rows_in_order[record.id], record.repetition)
    )
    lines = (json.dumps(record.model_dump(), ensure_ascii=False, default=str) + "\n" for record in ordered)
    said = f"results: {path}{_replaced(path, ordered[0])}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(lines).encode(errors="backslashreplace"))
    except OSError as error:
        raise WrongInput([f"{path.absolute()} cannot be written: {error.strerror}"]) from error
    return said


def _replaced(path: Path, record: ResultRecord) -> str:
    """What the results in a file are of that these are not; empty for results of the same."""
    try:
        earlier = read_results(path)[0]
    except WrongInput:
        return ""
    pairs = (
        ("", earlier.model, record.model),
        ("the data set ", earlier.dataset, record.dataset),
        ("the reward ", earlier.evaluators, record.evaluators),
    )
    differing = [f"{what}{before}" for what, before, after in pairs if before and before != after]
    return f" (in place of results of {', '.join(differing)}; --results FILE keeps both)" if differing else ""


def read_results(path: Path) -> list[ResultRecord]:
    """The records of a file; of a file with a baseline the records of the evaluated step, which come first.

    Raises:
        WrongInput: the file cannot be read, or a line is no record.
    """
    records: list[ResultRecord] = []
    try:
        for number, line in enumerate(read_text(path).split("\n"), 1):
            if line.strip():
                records.append(_record(line, number))
        if not records:
            raise ValueError("has no results")
    except ValueError as error:
        raise WrongInput([f"{path}: {error}"]) from error
    return [record for record in records if record.model == records[0].model]


def _record(line: str, number: int) -> ResultRecord:
    try:
        return ResultRecord.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{'.'.join(map(str, first['loc']))} {first['msg']}".strip()
        raise ValueError(f"line {number} is no result of `art eval` ({what}): name an eval_results.jsonl") from error


def row_rewards(records: Sequence[ResultRecord]) -> dict[str, float | None]:
    """The mean reward of each row over its repetitions, by id; None if all failed."""
    by_id: dict[str, list[float]] = {}
    for record in records:
        rewards = by_id.setdefault(record.id, [])
        if record.reward is not None:
            rewards.append(record.reward)
    return {row: statistics.fmean(rewards) if rewards else None for row, rewards in by_id.items()}


def mean_reward(records: Sequence[ResultRecord]) -> Estimate:
    """The mean over rows, with its interval.

    Raises:
        WrongInput: no rollout has a reward.
    """
    known = [reward for reward in row_rewards(records).values() if reward is not None]
    if not known:
        raise WrongInput(["no rollout has a reward: all failed"])
    return estimate_rewards(known)


def shown(records: Sequence[ResultRecord]) -> str:
    """The outputs, rewards and reasons of rollouts as text."""
    lines: list[str] = []
    for record in records:
        reward = "failed" if record.reward is None else f"reward {record.reward:g}"
        lines.append(f"{record.model}, row {record.id!r}, repetition {record.repetition}: {reward}")
        if record.error is None or record.output is not None:
            lines.append(f"  output: {record.output}")
        if record.error is not None:
            lines.append(f"  error: {record.error}")
        lines += [f"  reason of {name}: {reason}" for name, reason in record.reasons.items()]
    return "\n".join(lines)


def check_at_least(what: str, measured: Estimate, at_least: float | None, flag: str = "--at_least") -> None:
    """Checks that a mean is surely at least a number.

    Raises:
        BelowTarget: the lower end of the mean's interval is below the number.
    """
    if at_least is None or measured.interval[0] >= at_least:
        return
    reason = f"the lower end of its interval, {measured.interval[0]:.4g}, is below {flag} {at_least:g}"
    if measured.num_scenarios == 1:
        reason = f"one row has no interval, and {flag} {at_least:g} needs two or more"
    elif measured.mean >= at_least:
        reason += ". The mean is not: more rows make the interval narrower"
    raise BelowTarget(f"{what} {measured}: {reason}")
