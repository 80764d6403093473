"""The server's database, `PATH/.server/server.sqlite`: models, their metrics, jobs, and scores of answers.

A model has a number, the column `model`. The number is given at the registration and stays when the model is renamed. Metrics,
jobs and the records of the ledger refer to the number. It is random, so it is never used again, also if this file is lost or
replaced by an older backup, while the ledger keeps its records.

An earlier server kept jobs in `jobs.sqlite` and metrics in `history.sqlite`. A start that finds such files takes the jobs over in
one transaction, and then sets both files aside. The metrics are read from each model's history.jsonl.
"""

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from art_server.store import files
from art_server.store.database import Database, column_names, open_database, unread_version
from art_server.store.model_folder import list_model_folders
from art_server.store.model_table import ModelTable, insert_model

FILE = "server.sqlite"
VERSION = 1
"""The version of the schema, in `PRAGMA user_version`."""
SCHEMA = (
    """
    CREATE TABLE models (
        model INTEGER PRIMARY KEY,              -- random (`insert_model`)
        project TEXT NOT NULL,
        name TEXT NOT NULL,
        registered_at REAL NOT NULL,            -- as in its model.json
        folder TEXT NOT NULL,                   -- its folder's name; differs from `name` until a rename has moved the folder
        rolled_back_to INTEGER,                 -- set until a rollback has set the later steps aside
        is_deleted INTEGER NOT NULL DEFAULT 0   -- the row stays, because jobs refer to it
    )
    """,
    "CREATE UNIQUE INDEX models_by_name ON models (project, name) WHERE NOT is_deleted",
    """
    CREATE TABLE steps (
        model INTEGER NOT NULL,
        step INTEGER NOT NULL,
        recorded_at TEXT,                       -- of the step's first train or log call
        job_id TEXT,                            -- the job that made the step
        PRIMARY KEY (model, step)
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE metrics (
        model INTEGER NOT NULL,
        name TEXT NOT NULL,
        step INTEGER NOT NULL,
        value REAL,                             -- the newest of the step; NULL if it is no finite number
        PRIMARY KEY (model, name, step)
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE jobs (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        job_id TEXT NOT NULL UNIQUE,
        model INTEGER NOT NULL,
        idempotency_key TEXT,
        request_digest TEXT NOT NULL,
        config TEXT NOT NULL,
        batch BLOB,
        trajectories BLOB,
        created_at REAL NOT NULL,
        place REAL,                             -- order in the queue; NULL: the number
        state TEXT NOT NULL DEFAULT 'queued',
        phase TEXT NOT NULL DEFAULT 'queued',
        completed INTEGER,
        total INTEGER,
        target_step INTEGER,
        attempts TEXT NOT NULL DEFAULT '{}',
        next_attempt_at REAL,                   -- NULL: at once
        last_error TEXT,
        report TEXT NOT NULL,
        metrics TEXT NOT NULL DEFAULT '{}',
        finished_at REAL,
        changes INTEGER NOT NULL DEFAULT 0,
        num_tokens INTEGER NOT NULL DEFAULT 0,  -- computed for it
        begins REAL,                            -- virtual times (fair_order.py); NULL: it has not begun
        ends REAL,
        seconds REAL,                           -- of its last attempt, if that made a step
        signs TEXT,                             -- JSON of its batch's signs (batch_signs.py)
        expected_step INTEGER                   -- of its request; NULL: any
    )
    """,
    "CREATE UNIQUE INDEX jobs_by_request ON jobs (model, idempotency_key)",
    "CREATE INDEX jobs_by_state ON jobs (state, number)",
)

ENDED_SCORE = "state IN ('trained', 'dropped', 'replaced', 'retracted')"
"""Of scores that no job may take any more."""
DAY = "CAST(created_at / 86400 AS INTEGER)"
"""The day of a score, in days since 1970 (UTC)."""
LEARNING = (
    """
    CREATE TABLE IF NOT EXISTS scores (         -- art_server/learning/scores.py
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        score_id TEXT NOT NULL UNIQUE,
        model INTEGER NOT NULL,
        target TEXT NOT NULL,                   -- "answer RID-0" or "session S"
        choices TEXT NOT NULL,                  -- JSON: the ids of the judged choices
        step INTEGER,                           -- the oldest step that sampled one of them
        names_step INTEGER NOT NULL DEFAULT 0,  -- whether a judged request named its step, or was a rollout's
        user TEXT,                              -- a keyed hash; NULL: the score names no user
        session TEXT,                           -- a keyed hash of the judged answer's session; NULL: it has none
        owner TEXT NOT NULL,                    -- of the key
        name TEXT NOT NULL,
        value REAL,                             -- NULL: the score has texts only
        texts TEXT NOT NULL,                    -- JSON: comment, correction, metadata
        teaches TEXT,                           -- "comment" or "correction": which text may teach; NULL: none
        client_id TEXT,
        digest TEXT NOT NULL,                   -- of the request's content
        made_at REAL,
        answered_at REAL NOT NULL,
        created_at REAL NOT NULL,
        state TEXT NOT NULL,
        reason TEXT,                            -- of a dropped score
        job_id TEXT,
        trained_step INTEGER,
        replaces TEXT,
        pinned BLOB                             -- the exact tokens; NULL once the score cannot be trained any more
    )
    """,
    "CREATE UNIQUE INDEX IF NOT EXISTS scores_by_client_id ON scores (model, owner, client_id) WHERE client_id IS NOT NULL",
    "CREATE INDEX IF NOT EXISTS scores_by_target ON scores (model, target)",
    "CREATE INDEX IF NOT EXISTS scores_by_state ON scores (model, state, reason, number)",
    "CREATE INDEX IF NOT EXISTS scores_by_job ON scores (job_id) WHERE job_id IS NOT NULL",
    # For pruning (`Scores.prune`).
    f"CREATE INDEX IF NOT EXISTS scores_by_end ON scores (created_at) WHERE {ENDED_SCORE}",
    f"CREATE INDEX IF NOT EXISTS scores_with_texts ON scores (created_at) WHERE {ENDED_SCORE} AND texts <> '{{}}'",
    "CREATE INDEX IF NOT EXISTS scores_by_step ON scores (model, step, answered_at)",  # a canary's looks
    # What people see of a million scores is read from this index alone, in the order of its groups (art_watch/scores.py).
    f"CREATE INDEX IF NOT EXISTS scores_by_day ON scores (model, {DAY}, name, step, state, value, created_at, answered_at)",
    """
    CREATE TABLE IF NOT EXISTS taken_choices (  -- by jobs of scores: no choice is trained by two
        choice_id TEXT PRIMARY KEY,
        job_id TEXT NOT NULL
    ) WITHOUT ROWID
    """,
    "CREATE INDEX IF NOT EXISTS taken_choices_by_job ON taken_choices (job_id)",
    """
    CREATE TABLE IF NOT EXISTS learning (       -- art_server/learning/policies.py
        model INTEGER PRIMARY KEY,
        state TEXT NOT NULL,
        policy TEXT NOT NULL,
        reason TEXT,                            -- why it is paused; NULL: somebody paused it
        since REAL NOT NULL                     -- when the newest batch was made, or learning began
    )
    """,
    """
    CREATE TABLE IF NOT EXISTS releases (       -- art_server/learning/releases.py
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        model INTEGER NOT NULL,
        state TEXT NOT NULL,
        incumbent INTEGER NOT NULL,             -- the step that serves while the release is open
        passed INTEGER NOT NULL,                -- the newest step that has passed the guard
        candidate INTEGER,                      -- the step of the canary
        share REAL,                             -- of the users whom the candidate answers
        num_refused INTEGER NOT NULL DEFAULT 0, -- steps in a row that the guard has refused
        num_looks INTEGER NOT NULL DEFAULT 0,   -- looks at a canary's scores that decided nothing
        reason TEXT,                            -- of the newest decision
        began_at REAL NOT NULL,
        split_at REAL,                          -- when the canary began
        ended_at REAL                           -- NULL: the release is open
    )
    """,
    "CREATE UNIQUE INDEX IF NOT EXISTS one_open_release ON releases (model) WHERE ended_at IS NULL",
)
"""The tables of scores, which a database of an earlier commit lacks."""

JOBS_FILE = "jobs.sqlite"
EARLIER_FILES = (JOBS_FILE, "history.sqlite")
EARLIER_VERSIONS = (2, 3)
"""Of the table of jobs; 2 is that of commit 72080d0."""
MODEL_OF_JOB = """
    SELECT model FROM models WHERE models.project = earlier.jobs.project AND models.name = earlier.jobs.name
    AND (is_deleted OR registered_at <= created_at OR state IN ('queued', 'running') OR idempotency_key IS NOT NULL)
    ORDER BY is_deleted LIMIT 1
"""
"""The number of an earlier job's model. A deleted model had no job that had not ended, and its jobs no keys; of other jobs the
times say whether the model of their name was registered later."""


def open_server_database(root: Path | None) -> Database:
    """The database of the server whose folder is `root`; None: a temporary database.

    Raises:
        UsageError: another version wrote the file, or the table of jobs of an earlier server.
        StorageFull: the disk is full, read-only or broken.
        Unavailable: another program locks the file.
    """
    if root is None:
        database = Database(open_database(None, "", is_durable=False), None)
        make_tables(database)
        add_tables(database)
        return database
    server_dir = root / ".server"
    database = Database(open_database(server_dir / FILE, "", is_durable=True), server_dir / FILE)
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(database.close)
        ((version,),) = database.select("PRAGMA user_version")
        if version not in (0, VERSION):
            raise unread_version(FILE)
        with attached_jobs(database.connection, server_dir / JOBS_FILE) as has_jobs, database.changes("the tables"):
            if version == 0:
                make_tables(database)
            add_tables(database)
            if has_jobs:
                take_jobs(database, root)
        set_aside(server_dir)
        on_failure.pop_all()
    return database


def make_tables(database: Database) -> None:
    with database.changes("the tables") as connection:
        for statement in SCHEMA:
            connection.execute(statement)
        # A number in the file's header, so it is a part of the transaction.
        connection.execute(f"PRAGMA user_version={VERSION}")


def add_tables(database: Database) -> None:
    with database.changes("the tables") as connection:
        columns = column_names(connection, "scores")
        if columns and "teaches" not in columns:  # a table of an earlier commit, in which each score has a value
            connection.execute("ALTER TABLE scores RENAME TO earlier_scores")
            connection.execute(LEARNING[0])
            names = ", ".join(sorted(columns))
            connection.execute(f"INSERT INTO scores ({names}) SELECT {names} FROM earlier_scores ORDER BY number")
            connection.execute("DROP TABLE earlier_scores")
        for statement in LEARNING:
            connection.execute(statement)


@contextlib.contextmanager
def attached_jobs(connection: sqlite3.Connection, file: Path) -> Iterator[bool]:
    """Inside the block an earlier server's table of jobs is open as `earlier`; yields whether there is one.

    Raises:
        UsageError: the table has another version.
    """
    if not file.exists():
        yield False
        return
    connection.execute("ATTACH ? AS earlier", (str(file),))
    try:
        (version,) = connection.execute("PRAGMA earlier.user_version").fetchone()
        has_jobs = bool(column_names(connection, "jobs", "earlier"))
        if version not in EARLIER_VERSIONS and (version or has_jobs):
            raise unread_version("the table of jobs")
        yield has_jobs
    finally:
        connection.execute("DETACH earlier")  # its log becomes a part of the file


def take_jobs(database: Database, root: Path) -> None:
    """Copies an earlier server's jobs behind the jobs that are there, in one transaction with the models that they name: those
    under `root`, and deleted models. Jobs that are there already are left out: a killed server has copied them."""
    table, connection = ModelTable(database), database.connection
    rows = table.rows_by_folder()
    for folder in list_model_folders(root):
        if folder.newest_step() is not None:
            record = folder.read()
            if (folder.project, folder.name, record.created_at) not in rows:
                table.add(record)
    deleted = f"SELECT DISTINCT project, name FROM earlier.jobs WHERE NOT EXISTS ({MODEL_OF_JOB})"
    for project, name in connection.execute(deleted).fetchall():
        insert_model(connection, project, name, is_deleted=True)
    columns = column_names(connection, "jobs", "earlier") & column_names(connection, "jobs") - {"number", "place"}
    names = ", ".join(sorted(columns))
    connection.execute(
        f"INSERT OR IGNORE INTO jobs (model, number, place, {names}) SELECT ({MODEL_OF_JOB}), number + last, place + last,"
        f" {names} FROM earlier.jobs, (SELECT COALESCE(MAX(number), 0) AS last FROM main.jobs) ORDER BY number"
    )


def set_aside(server_dir: Path) -> None:
    """Renames the files of an earlier server, so that this earlier version, started again, repeats no job."""
    names = [f"{name}{ending}" for name in EARLIER_FILES for ending in ("-wal", "-shm", "")]
    existing = [name for name in names if (server_dir / name).exists()]
    if existing:
        files.sync(server_dir)  # with the new database's entry
    prefix = "earlier-"
    while any((server_dir / f"{prefix}{name}").exists() for name in existing):  # the earlier version was started again
        prefix += "earlier-"
    for name in existing:
        os.replace(server_dir / name, server_dir / f"{prefix}{name}")
