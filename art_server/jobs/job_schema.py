"""The schema of the table of jobs (`queue.py`), and the way from the schema before it."""

import sqlite3

from art_server.store.database import column_names, transaction, unread_version

VERSION = 3
"""The version of the schema, in `PRAGMA user_version`."""
SCHEMA = (
    """
    CREATE TABLE jobs (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        job_id TEXT NOT NULL UNIQUE,
        project TEXT NOT NULL,
        name TEXT NOT NULL,
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
    "CREATE UNIQUE INDEX jobs_by_request ON jobs (project, name, idempotency_key)",
    "CREATE INDEX jobs_by_state ON jobs (state, number)",
)

FROM_VERSION_2 = (
    "ALTER TABLE jobs ADD COLUMN signs TEXT",
    "ALTER TABLE jobs ADD COLUMN expected_step INTEGER",
)


def migrate_jobs(database: sqlite3.Connection) -> None:
    """Makes the table, or gives a table of version 2 its new columns, in one transaction.

    Raises:
        UsageError: the table has another version.
    """
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if version == VERSION:
        return
    if version not in (0, 2) or (version == 0 and column_names(database, "jobs")):
        raise unread_version("the table of jobs")
    with transaction(database):
        for statement in SCHEMA if version == 0 else FROM_VERSION_2:
            database.execute(statement)
        database.execute(f"PRAGMA user_version={VERSION}")
