"""The differences between two evaluations of the same rows: in numbers, and as a page of one HTML file without scripts."""

import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art.estimates import Estimate, estimate_differences
from art.files import write_whole
from art.finetune.errors import WrongInput
from art.finetune.results import ResultRecord, mean_reward, row_rewards

STYLE = """
:root { color-scheme: light dark; --line: light-dark(#ddd, #444); --muted: light-dark(#666, #aaa);
  --good: light-dark(#1f7a4d, #5fc795); --bad: light-dark(#b3261e, #ff8a80); --back: light-dark(#fff, #17181a); }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; padding: 0 1rem; max-width: 90rem; background: var(--back); }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: .4rem .6rem; text-align: left; vertical-align: top; }
.rows td { width: 28%; overflow-wrap: anywhere; } .rows td:first-child { width: 16%; }
pre { white-space: pre-wrap; margin: 0; font: inherit; }
.muted { color: var(--muted); font-size: .9em; } .better { color: var(--good); } .worse { color: var(--bad); }
summary { cursor: pointer; font-weight: 600; margin-top: 2rem; }
@media (max-width: 40rem) {
  .rows tbody, .rows tr, .rows td { display: block; } .rows td, .rows td:first-child { width: auto; border: 0; }
  .rows tr { border-bottom: 1px solid var(--line); } .rows tr:first-child { display: none; }
  [data-of]::before { content: attr(data-of); color: var(--muted); }
}
"""
KINDS = ("worse", "better", "equal", "in one only")
"""What a row can be in the later evaluation."""
MAX_CHARACTERS = 4_000
"""The longest output that the page shows of a rollout."""


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """Two evaluations of the same rows."""

    names: tuple[str, str]
    """Of the earlier evaluation, and of the later one."""
    rewards: tuple[Estimate, Estimate]
    difference: Estimate | None
    """The mean over rows that have a reward in both; None: there is no such row."""
    by_row: dict[str, tuple[float | None, float | None]]
    """The mean rewards of each row in both; None: the row is missing, or all its rollouts failed."""

    def __repr__(self) -> str:
        (before, after), (first, second) = self.rewards, self.names
        counts = ", ".join(f"{len(self.rows(kind))} {kind}" for kind in KINDS)
        doubt = "" if self.is_decided else ", not decided"
        return (
            f"Comparison({second}: reward {after}; {first}: reward {before}; difference {self.difference}{doubt}; "
            f"rows: {counts})"
        )

    @property
    def is_decided(self) -> bool:
        """Whether the interval of the difference leaves 0 out."""
        return self.difference is not None and not self.difference.interval[0] <= 0 <= self.difference.interval[1]

    def rows(self, kind: str) -> list[str]:
        """The ids of the rows of a kind (`KINDS`), the largest difference first."""
        changes = {row: _change(*rewards) for row, rewards in self.by_row.items()}
        rows = [row for row, change in changes.items() if _kind(change) == kind]
        return sorted(rows, key=lambda row: -abs(changes[row] or 0.0))


def _change(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _kind(change: float | None) -> str:
    if change is None:
        return "in one only"
    if change == 0:
        return "equal"
    return "better" if change > 0 else "worse"


def compare(before: Sequence[ResultRecord], after: Sequence[ResultRecord]) -> Comparison:
    """The comparison of two evaluations. Rows belong together by their ids.

    Raises:
        WrongInput: no row is in both, or an evaluation has no reward.
    """
    first, second = row_rewards(before), row_rewards(after)
    if first.keys().isdisjoint(second):
        raise WrongInput(["the two evaluations have no row in common: compare evaluations of the same data set"])
    by_row = {row: (first.get(row), second.get(row)) for row in dict.fromkeys([*second, *first])}
    changes = [change for rewards in by_row.values() if (change := _change(*rewards)) is not None]
    rewards = [record.reward for record in (*before, *after) if record.reward is not None]
    names = before[0].model, after[0].model
    if names[0] == names[1]:
        names = f"{names[0]} (before)", names[1]
    return Comparison(
        names,
        (mean_reward(before), mean_reward(after)),
        estimate_differences(changes, rewards) if changes else None,
        by_row,
    )


def write_page(
    path: Path, comparison: Comparison, before: Sequence[ResultRecord], after: Sequence[ResultRecord]
) -> None:
    """Writes the page. All texts of rows and answers are escaped.

    Raises:
        WrongInput: the file cannot be written.
    """
    try:
        write_whole(path, _page(comparison, before, after).encode(errors="backslashreplace"))
    except OSError as error:
        raise WrongInput([f"{path.absolute()} cannot be written: {error.strerror}"]) from error


def _page(comparison: Comparison, before: Sequence[ResultRecord], after: Sequence[ResultRecord]) -> str:
    records = _by_id(before), _by_id(after)
    first, second = comparison.names
    title = f"{_text(second)} compared with {_text(first)}"
    parts = [f"<h1>{title}</h1>", _summary(comparison)]
    for kind in KINDS:
        rows = comparison.rows(kind)
        if not rows:
            continue
        lines = "".join(_row(row, comparison, records) for row in rows)
        head = f"<tr><th>row</th><th>question</th><th>{_text(first)}</th><th>{_text(second)}</th></tr>"
        is_open = " open" if kind in ("worse", "better") else ""
        summary = f"<summary>{len(rows)} {kind}</summary>"
        parts.append(f'<details{is_open}>{summary}<table class="rows">{head}{lines}</table></details>')
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>'
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _summary(comparison: Comparison) -> str:
    lines = [
        (name, reward, f"{reward.num_scenarios}")
        for name, reward in zip(comparison.names, comparison.rewards, strict=True)
    ]
    cells = [f"<tr><td>{_text(name)}</td>{_estimate(reward)}<td>{rows}</td></tr>" for name, reward, rows in lines]
    if (difference := comparison.difference) is not None:
        cells.append(f"<tr><td>difference, paired</td>{_estimate(difference)}<td>{difference.num_scenarios}</td></tr>")
    head = "<tr><th>evaluation</th><th>reward</th><th>95% interval</th><th>rows</th></tr>"
    return f'<div class="scroll"><table>{head}{"".join(cells)}</table></div>'


def _estimate(value: Estimate) -> str:
    low, high = value.interval
    return f"<td>{value.mean:.4g}</td><td>{low:.4g} to {high:.4g}</td>"


def _row(
    row: str,
    comparison: Comparison,
    records: tuple[dict[str, list[ResultRecord]], dict[str, list[ResultRecord]]],
) -> str:
    known = [*records[0].get(row, []), *records[1].get(row, [])][0]
    expected = "" if known.answer is None else f'<div class="muted">expected: {_text(_shown(known.answer))}</div>'
    rewards = comparison.by_row[row]
    looks = "", _kind(_change(*rewards))
    cells = [
        f'<td data-of="{_text(name)}">{_cell(reward, look, side.get(row, []))}</td>'
        for name, reward, look, side in zip(comparison.names, rewards, looks, records, strict=True)
    ]
    return f"<tr><td>{_text(row)}</td><td>{_block(known.question)}{expected}</td>{''.join(cells)}</tr>"


def _cell(reward: float | None, look: str, records: Iterable[ResultRecord]) -> str:
    mean = "no reward" if reward is None else f"reward {reward:.4g}"
    parts = [f'<div class="{look}"><b>{mean}</b></div>']
    for record in records:
        parts.append(_block(record.error if record.error is not None else record.output))
        parts += [f'<div class="muted">{_text(f"{name}: {reason}")}</div>' for name, reason in record.reasons.items()]
    return "".join(parts)


def _by_id(records: Iterable[ResultRecord]) -> dict[str, list[ResultRecord]]:
    by_id: dict[str, list[ResultRecord]] = {}
    for record in records:
        by_id.setdefault(record.id, []).append(record)
    return by_id


def _block(value: Any) -> str:
    return f"<pre>{_text(_shown(value) or '(empty)')}</pre>"


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}... ({len(text):,} characters)"


def _text(text: str) -> str:
    return html.escape(text)
