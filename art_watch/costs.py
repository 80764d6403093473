"""What a run has cost: sampled tokens, rollouts, time and money, and what of that trained nothing, by reason.

The sums are over all jobs of the model, also over those that failed or whose steps were rolled back. A folder without the table of
jobs has no costs.
"""

import contextlib
import sqlite3
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from art_server.jobs.job_row import ENDED, JOBS
from art_server.store.model_folder import ModelFolder
from art_server.store.server_database import FILE

LOGGED = "costs/all"
"""The metric in which a program logs what its own calls cost, such as a judge's."""
ROLLOUTS = "json_extract(report, '$.num_trajectories') + json_extract(report, '$.num_failed_rollouts')"
# Reports of commit 64293efc lack the number of sampled tokens.
TOKENS = "coalesce(json_extract(report, '$.num_sampled_tokens'), json_extract(report, '$.num_trained_tokens'))"
OF_MODEL = "project = ? AND folder = ? AND registered_at = ? AND NOT is_deleted"
SUMS = f"""
    SELECT state, count(*), total({ROLLOUTS}), total({TOKENS}), total(seconds)
    FROM {JOBS} WHERE {OF_MODEL} AND state IN {ENDED} GROUP BY state
"""
UNUSED = f"""
    SELECT json_extract(unused.value, '$.reason') AS reason,
        total(json_extract(unused.value, '$.num_rollouts')), total(json_extract(unused.value, '$.num_tokens'))
    FROM {JOBS}, json_each(report, '$.unused') AS unused WHERE {OF_MODEL} AND state = 'done' GROUP BY reason
"""
ENDS = {"failed": "the job failed", "cancelled": "the job was cancelled"}
"""Why all rollouts of a job trained nothing, by its state."""


@contextlib.contextmanager
def opened(file: Path) -> Iterator[sqlite3.Connection]:
    """A server's database, to read only.

    Raises:
        sqlite3.Error: the file is no database.
    """
    # Without a write-ahead log nobody writes the tables, and SQLite needs no files beside the database.
    mode = "mode=ro" if file.with_name(f"{file.name}-wal").exists() else "immutable=1"
    with contextlib.closing(sqlite3.connect(f"file:{quote(str(file))}?{mode}", uri=True)) as database:
        database.row_factory = sqlite3.Row
        yield database


def costs(root: Path, folder: ModelFolder, registered_at: float) -> dict[str, Any] | None:
    """What the jobs of the model that was registered at this time have cost; None without jobs that are known."""
    file, values = root / ".server" / FILE, (folder.project, folder.name, registered_at)
    if not file.exists():
        return None
    try:
        with opened(file) as database:
            states = [tuple(row) for row in database.execute(SUMS, values)]
            unused = [tuple(row) for row in database.execute(UNUSED, values)]
    except sqlite3.Error:  # of an older version, or damaged
        return None
    if not states:
        return None
    unused += [(ENDS[state], rollouts, tokens) for state, _, rollouts, tokens, _ in states if state in ENDS]
    return {
        "num_jobs": sum(num for _, num, _, _, _ in states),
        "num_rollouts": int(sum(rollouts for _, _, rollouts, _, _ in states)),
        "num_tokens": int(sum(tokens for _, _, _, tokens, _ in states)),
        "step_seconds": sum(seconds for *_, seconds in states),
        "unused": [
            {"reason": reason, "num_rollouts": int(rollouts), "num_tokens": int(tokens)}
            for reason, rollouts, tokens in sorted(unused, key=lambda row: (-row[1], row[0]))
            if rollouts
        ],
    }


def price(price_per_hour: float | None, first_at: str | None, last_at: str | None) -> float | None:
    """What the machines of a run have cost between two times (ISO texts); None without a price."""
    if price_per_hour is None or first_at is None or last_at is None:
        return None
    seconds = (datetime.fromisoformat(last_at) - datetime.fromisoformat(first_at)).total_seconds()
    return price_per_hour * max(0.0, seconds) / 3600
