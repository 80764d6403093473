"""How often a reward agrees with the labels of people, on given answers. No policy is asked."""

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import art
from art.bars import make_bar
from art.contained import contained
from art.estimates import Estimate, estimate_rewards
from art.finetune.agent import line_of_failure, reason_of
from art.finetune.errors import FinetuneError
from art.finetune.results import ResultRecord
from art.finetune.rows import DatasetRow
from art.finetune.scoring import Reward
from art.pool import num_tolerated, run_all

if TYPE_CHECKING:
    from tqdm.auto import tqdm

GOOD = 0.5
"""Scores and labels from this number on count as good."""
WORDS = {"yes": 1.0, "true": 1.0, "pass": 1.0, "good": 1.0, "no": 0.0, "false": 0.0, "fail": 0.0, "bad": 0.0}
SHOWN_IDS = 5


@dataclass(frozen=True, slots=True, repr=False)
class Agreement:
    """How often a reward agrees with labels."""

    share: Estimate
    """The share of the answers where both are good, or both are not."""
    kappa: float | None
    """Cohen's kappa: the share without what chance gives, from 0 (chance) to 1; None if labels or scores are all alike."""
    differing: list[str]
    """The ids of the rows where the two differ."""
    num_failed: int
    """Answers that could not be scored. They are in no figure."""
    records: list[ResultRecord]

    def __repr__(self) -> str:
        kappa = "no kappa, because one of the two is always alike" if self.kappa is None else f"kappa {self.kappa:.3g}"
        shown = ", ".join(self.differing[:SHOWN_IDS]) + (", ..." if len(self.differing) > SHOWN_IDS else "")
        differing = f", {len(self.differing)} differ: {shown}" if self.differing else ""
        failed = f", {self.num_failed} could not be scored" if self.num_failed else ""
        return f"Agreement({self.share}, {kappa}{differing}{failed})"


def label_of(row: DatasetRow) -> float:
    """The label of a row, from 0 to 1.

    Raises:
        ValueError: the row has no label, or the label is out of range.
    """
    value: Any = row.columns.get("label")
    number = WORDS.get(value.strip().lower()) if isinstance(value, str) else value
    if number is None and isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            number = None
    if not isinstance(number, bool | int | float) or not 0 <= number <= 1:
        raise ValueError(f"{row.location} has the label {value!r}: a label is a number from 0 to 1, or yes or no")
    return float(number)


async def agreement(
    reward: Reward, rows: Sequence[DatasetRow], *, labels: str, max_exceptions: float, max_concurrency: int
) -> Agreement:
    """The agreement of a reward with the column `label`, on the answers in the column `output`. `labels` is the rows' file.

    Raises:
        FinetuneError: more answers than `max_exceptions` tolerates (`num_tolerated`) could not be scored.
    """
    slots = asyncio.Semaphore(max_concurrency)
    with make_bar(desc="labels", total=len(rows)) as bar:
        records = await run_all(_scored(reward, row, slots, bar) for row in rows)
    failed = [f"{row.location}: {record.error}" for row, record in zip(rows, records, strict=True) if record.error]
    if len(failed) > num_tolerated(max_exceptions, len(rows)) or len(failed) == len(rows):
        raise FinetuneError(f"{labels}: {len(failed)} of {len(rows)} answers could not be scored; {failed[0]}")
    good_labels: list[bool] = []
    scores: list[bool] = []
    differing: list[str] = []
    for row, record in zip(rows, records, strict=True):
        if record.reward is not None:
            good_labels.append(label_of(row) >= GOOD)
            scores.append(record.reward >= GOOD)
            if good_labels[-1] != scores[-1]:
                differing.append(row.id if record.repetition == 1 else f"{row.id} (repetition {record.repetition})")
    share = estimate_rewards([float(label == score) for label, score in zip(good_labels, scores, strict=True)])
    return Agreement(share, cohens_kappa(good_labels, scores), differing, len(failed), records)


def _repetition_of(row: DatasetRow) -> int:
    text = str(row.columns.get("repetition"))
    return int(text) if text.isdecimal() else 1


async def _scored(reward: Reward, row: DatasetRow, slots: asyncio.Semaphore, bar: "tqdm[Any]") -> ResultRecord:
    output = row.columns.get("output")
    record = ResultRecord(
        model=str(row.columns.get("model") or ""),
        id=row.id,
        repetition=_repetition_of(row),
        question=row.question,
        answer=row.answer,
        output=output,
    )
    message: Any = {"role": "assistant", "content": str(output)}
    trajectory = art.Trajectory(messages_and_choices=[{"role": "user", "content": row.question}, message])
    label = {"label": row.columns.get("label")}
    try:
        async with slots:
            with contained("the evaluator"):
                reasons = await reward.score(row, output, trajectory)
    except Exception as error:  # of any kind: an evaluator is the user's code
        reason = f"{reason_of(error)}{line_of_failure(error)}{_missing_column(error, row)}"
        return record.model_copy(update={"error": reason, **label})
    finally:
        bar.update()
    return record.model_copy(update={"reward": trajectory.reward, "reasons": reasons, **label})


def _missing_column(error: Exception, row: DatasetRow) -> str:
    """The column that an evaluator missed in a row, in words; empty if the error is another."""
    if not isinstance(error, KeyError) or error.args[0] in row.columns:
        return ""
    return f": the labels lack the column {error.args[0]!r}, which your evaluator reads"


def cohens_kappa(labels: Sequence[bool], scores: Sequence[bool]) -> float | None:
    """Cohen's kappa of two judgements. Source: Cohen 1960, A coefficient of agreement for nominal scales."""
    agreeing = statistics.fmean(label == score for label, score in zip(labels, scores, strict=True))
    good, scored = statistics.fmean(labels), statistics.fmean(scores)
    by_chance = good * scored + (1 - good) * (1 - scored)
    return None if good in (0, 1) or scored in (0, 1) else (agreeing - by_chance) / (1 - by_chance)
