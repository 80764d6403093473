"""Scores of an agent's answers as people see them: their numbers by day, and the scores of a rollout or a session.

Reads the server's database, also without a running server. A million scores take less than a second: the sums by day are read from one
index (`scores_by_day` in `art_server/store/server_database.py`).
"""

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from art_server.store.model_folder import ModelFolder
from art_server.store.server_database import DAY, FILE
from art_watch.costs import opened
from art_watch.runs import read_record

NUM_DAYS = 14
"""Newest days whose scores are summed: as long as a canary may take."""
NUM_NEWEST = 10_000
"""Newest scores whose delay is read, and newest answers whose share of scored ones is counted."""
USER_DIGITS = 8
"""Digits of a user's hash that people see."""
MAX_RELEASES = 100
MAX_CHOICES = 500
"""Choices that one request may name."""
LEDGER = "ledger.sqlite"
NUMBER = "SELECT model FROM models WHERE project = ? AND folder = ? AND registered_at = ? AND NOT is_deleted"
NOT_TAKEN_BACK = "state NOT IN ('replaced', 'retracted')"
BY_DAY = f"""
    SELECT {DAY} AS day, name, step, count(*) AS number, avg(value) AS mean
    FROM scores WHERE model = ? AND {DAY} > ? AND {NOT_TAKEN_BACK} AND value IS NOT NULL GROUP BY {DAY}, name, step
"""
MEANS = f"""
    SELECT name, avg(value) FROM scores WHERE model = ? AND {DAY} >= ? AND created_at >= ? AND {NOT_TAKEN_BACK} AND value IS NOT NULL
    GROUP BY name
"""
DELAYS = f"SELECT created_at - answered_at FROM scores WHERE model = ? ORDER BY {DAY} DESC LIMIT {NUM_NEWEST}"
ANSWERS = f"""
    SELECT choice_id, session FROM records
    WHERE number > (SELECT max(number) FROM records) - {NUM_NEWEST} AND model = ? AND coalesce(session, '') NOT GLOB 'rollout-*'
"""
"""A model's newest answers that no `art.rollout` asked for."""
SCORED = "SELECT DISTINCT target FROM scores WHERE model = ? AND target IN (SELECT value FROM json_each(?))"
RELEASES = f"""
    SELECT state, incumbent, coalesce(candidate, passed) AS step, reason, began_at, ended_at
    FROM releases WHERE model = ? ORDER BY number DESC LIMIT {MAX_RELEASES}
"""
SHOWN = "score_id, target, name, value, user, state, reason, step, trained_step, texts, created_at"
OF_TARGETS = (
    f"SELECT {SHOWN} FROM scores WHERE model = ? AND target IN (SELECT value FROM json_each(?)) ORDER BY number"
)
OF_JOBS = f"""
    SELECT {SHOWN} FROM scores WHERE model = ? AND target GLOB 'session *'
    AND job_id IN (SELECT job_id FROM taken_choices WHERE choice_id IN (SELECT value FROM json_each(?)))
    AND EXISTS (SELECT 1 FROM json_each(scores.choices) AS judged WHERE judged.value IN (SELECT value FROM json_each(?)))
    ORDER BY number
"""
"""The scores of sessions that trained some of the choices."""
Row = dict[str, Any]


def report(folder: ModelFolder) -> Row | None:
    """A model's scores by day, name and step, their delays in seconds, the share of answers that are scored, and the releases;
    None without scores."""
    with opened_scores(folder) as (database, model):
        if (
            database is None
            or not database.execute("SELECT 1 FROM scores WHERE model = ? LIMIT 1", (model,)).fetchall()
        ):
            return None
        since = int(time.time() // 86400) - NUM_DAYS
        return {
            "days": [dict(row) for row in database.execute(BY_DAY, (model, since))],
            "delay": delay([seconds for (seconds,) in database.execute(DELAYS, (model,))]),
            "answers": answers(server_dir(folder) / LEDGER, database, model),
            "releases": [dict(row) for row in database.execute(RELEASES, (model,))],
        }


def means(folder: ModelFolder) -> dict[str, float]:
    """The mean value of a model's scores of the last 24 hours, by name."""
    with opened_scores(folder) as (database, model):
        since = time.time() - 86400
        rows = [] if database is None else database.execute(MEANS, (model, int(since // 86400), since)).fetchall()
        return dict(map(tuple, rows))


def delay(seconds: Sequence[float]) -> Row:
    """The median and the 95th percentile of the seconds between an answer and its score."""
    ordered = sorted(max(0.0, value) for value in seconds)
    p50, p95 = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.95))
    return {"number": len(ordered), "p50": p50, "p95": p95}


def answers(file: Path, database: sqlite3.Connection, model: int) -> Row | None:
    """How many of a model's newest answers are scored, by themselves or with their session; None without a ledger."""
    if not file.exists():
        return None
    try:
        with opened(file) as ledger:
            targets = [
                (f"answer {choice}", f"session {session}") for choice, session in ledger.execute(ANSWERS, (model,))
            ]
    except sqlite3.Error:  # of an older version, or damaged
        return None
    wanted = json.dumps([target for pair in targets for target in pair])
    scored = {target for (target,) in database.execute(SCORED, (model, wanted))}
    return {"number": len(targets), "scored": sum(not scored.isdisjoint(pair) for pair in targets)}


def of_rollout(folder: ModelFolder, rollout: Row) -> list[Row]:
    """The scores of a rollout's answers, and of the sessions in which they trained."""
    return of_choices(folder, choices_of(rollout["histories"]))


def choices_of(histories: Sequence[Row]) -> list[str]:
    """The ids of the choices in conversations."""
    entries = [entry for history in histories for entry in history["entries"]]
    return [str(choice) for entry in entries if (choice := (entry.get("sampled_by") or {}).get("id")) is not None]


def of_choices(folder: ModelFolder, choices: Sequence[str], session: str | None = None) -> list[Row]:
    """The scores of choices, and those of a session."""
    targets = [f"answer {choice}" for choice in choices] + ([] if session is None else [f"session {session}"])
    with opened_scores(folder) as (database, model):
        if database is None or not targets:
            return []
        rows = {row["score_id"]: row for row in database.execute(OF_TARGETS, (model, json.dumps(targets)))}
        wanted = json.dumps(list(choices))
        rows |= {row["score_id"]: row for row in database.execute(OF_JOBS, (model, wanted, wanted))}
    return [score_row(row) for row in rows.values()]


def score_row(row: sqlite3.Row) -> Row:
    """A score as people see it. Of the hash of its user they see the first digits."""
    shown = dict(row)
    texts, user = json.loads(shown.pop("texts")), shown["user"]
    return shown | {"comment": texts.get("comment"), "user": None if user is None else user[:USER_DIGITS]}


@contextlib.contextmanager
def opened_scores(folder: ModelFolder) -> Iterator[tuple[sqlite3.Connection | None, int]]:
    """The database of a model's server, and the model's number; None if the server has no table of scores, or not this model."""
    file, record = server_dir(folder) / FILE, read_record(folder)
    numbered: tuple[sqlite3.Connection | None, int] = None, 0
    with contextlib.ExitStack() as stack:
        if record is not None and file.exists():
            values = (folder.project, folder.name, record.created_at)
            with contextlib.suppress(sqlite3.Error):  # of an older version, or damaged
                database = stack.enter_context(opened(file))
                database.execute("SELECT 1 FROM scores LIMIT 1")
                numbered = next(((database, number) for (number,) in database.execute(NUMBER, values)), numbered)
        yield numbered


def server_dir(folder: ModelFolder) -> Path:
    return folder.path.parents[2] / ".server"
