"""The server's database, `PATH/.server/server.sqlite`: models, their metrics and the table of jobs.

A model has a number, the column `model`. The number is given at the registration, stays when the model is renamed, and is never
used again. Metrics, jobs and the records of the ledger refer to the number.

An earlier server kept jobs in `jobs.sqlite` and metrics in `history.sqlite`. The first start takes the jobs over in the
transaction that makes the tables, and then sets both files aside. The metrics are read from each model's history.jsonl.
"""

import contextlib
import os
import sqlite3
from pathlib import Path

from art_server.store import files
from art_server.store.database import Database, column_names, open_database, transaction, unread_version
from art_server.store.model_folder import list_model_folders

FILE = "server.sqlite"
VERSION = 1
"""The version of the schema, in `PRAGMA user_version`."""
SCHEMA = (
    """
    CREATE TABLE models (
        model INTEGER PRIMARY KEY AUTOINCREMENT,
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

JOBS_FILE = "jobs.sqlite"
EARLIER_FILES = (JOBS_FILE, "history.sqlite")
EARLIER_VERSIONS = (2, 3)
"""Of the table of jobs; 2 is that of commit 72080d0."""
MODEL_OF_JOB = """
    SELECT model FROM models WHERE models.project = earlier.jobs.project AND models.name = earlier.jobs.name
    AND (is_deleted OR registered_at <= created_at) ORDER BY is_deleted LIMIT 1
"""
"""The number of an earlier job's model."""


def open_server_database(root: Path | None) -> Database:
    """The database of the server whose folder is `root`; None: a temporary database.

    Raises:
        UsageError: another version wrote the file, or the table of jobs of an earlier server.
    """
    if root is None:
        connection = open_database(None, "", is_durable=False)
        make_tables(connection, None)
        return Database(connection, None)
    server_dir = root / ".server"
    connection = open_database(server_dir / FILE, "", is_durable=True)
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(connection.close)
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            make_tables(connection, root)
        elif version != VERSION:
            raise unread_version(FILE)
        set_aside(server_dir)
        on_failure.pop_all()
    return Database(connection, server_dir / FILE)


def make_tables(connection: sqlite3.Connection, root: Path | None) -> None:
    """Makes the tables in one transaction, with the jobs of an earlier server under `root`."""
    has_jobs = root is not None and attach_jobs(connection, root / ".server" / JOBS_FILE)
    with transaction(connection):
        for statement in SCHEMA:
            connection.execute(statement)
        if root is not None and has_jobs:
            take_jobs(connection, root)
        # A number in the file's header, so it is a part of the transaction.
        connection.execute(f"PRAGMA user_version={VERSION}")
    if has_jobs:
        connection.execute("DETACH earlier")  # its log becomes a part of the file


def attach_jobs(connection: sqlite3.Connection, file: Path) -> bool:
    """Opens an earlier server's table of jobs as `earlier`; returns whether there is one.

    Raises:
        UsageError: the table has another version.
    """
    if not file.exists():
        return False
    connection.execute("ATTACH ? AS earlier", (str(file),))
    (version,) = connection.execute("PRAGMA earlier.user_version").fetchone()
    has_jobs = bool(column_names(connection, "jobs", "earlier"))
    if version not in EARLIER_VERSIONS and (version or has_jobs):
        raise unread_version("the table of jobs")
    return has_jobs


def take_jobs(connection: sqlite3.Connection, root: Path) -> None:
    """Copies an earlier server's jobs, in one transaction with the models that they name: those under `root`, and deleted
    models."""
    columns = column_names(connection, "jobs", "earlier") & column_names(connection, "jobs")
    for folder in list_model_folders(root):
        with contextlib.suppress(OSError, ValueError):  # a model.json that cannot be read
            row = (folder.project, folder.name, folder.name, folder.read().created_at)
            connection.execute("INSERT INTO models (project, name, folder, registered_at) VALUES (?, ?, ?, ?)", row)
    connection.execute(
        "INSERT INTO models (project, name, folder, registered_at, is_deleted)"
        " SELECT DISTINCT project, name, name, 0, 1 FROM earlier.jobs WHERE NOT EXISTS (" + MODEL_OF_JOB + ")"
    )
    names = ", ".join(sorted(columns))
    connection.execute(
        f"INSERT INTO jobs (model, {names}) SELECT ({MODEL_OF_JOB}), {names} FROM earlier.jobs ORDER BY number"
    )


def set_aside(server_dir: Path) -> None:
    """Renames the files of an earlier server, so that this earlier version, started again, repeats no job."""
    names = [f"{name}{ending}" for name in EARLIER_FILES for ending in ("-wal", "-shm", "")]
    existing = [name for name in names if (server_dir / name).exists()]
    if existing:
        files.sync(server_dir)  # with the new database's entry
    for name in existing:
        os.replace(server_dir / name, server_dir / f"earlier-{name}")
