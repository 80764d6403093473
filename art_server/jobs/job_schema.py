"""The schema of the table of jobs (`queue.py`), and the way from an earlier server's table to it."""

import gzip
import sqlite3
import zlib

from art_protocol.history import GZIP_MAGIC
from art_server.store.database import transaction

VERSION = 3
"""The version of the schema, in `PRAGMA user_version`. An earlier server's table has a lower version: `migrate_jobs` brings it
to this version."""
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


def migrate_jobs(database: sqlite3.Connection) -> None:
    """Makes the table, with the jobs of an earlier server's table, in one transaction."""
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if version == VERSION:
        return
    with transaction(database):
        earlier = [row["name"] for row in database.execute("PRAGMA table_info(jobs)")]
        if earlier:
            database.execute("ALTER TABLE jobs RENAME TO earlier_jobs")
            database.execute("DROP INDEX IF EXISTS jobs_by_request")
            database.execute("DROP INDEX IF EXISTS jobs_by_state")
        for statement in SCHEMA:
            database.execute(statement)
        if earlier:
            columns = [row["name"] for row in database.execute("PRAGMA table_info(jobs)")]
            kept = ", ".join(column for column in columns if column in earlier)
            source, target = kept, kept
            if version == 0:  # its column `error` is `last_error` here
                source, target = f"{kept}, error", f"{kept}, last_error"
            database.execute(f"INSERT INTO jobs ({target}) SELECT {source} FROM earlier_jobs")
            database.execute("DROP TABLE earlier_jobs")
            if version == 0:
                database.create_function("as_gzip", 1, _as_gzip)
                database.execute("UPDATE jobs SET trajectories = as_gzip(trajectories)")
        database.execute(f"PRAGMA user_version={VERSION}")


def _as_gzip(blob: bytes | None) -> bytes | None:
    """Trajectories as they are written to the model's folder; earlier servers compressed them in another format."""
    if blob is None or blob.startswith(GZIP_MAGIC):
        return blob
    return gzip.compress(zlib.decompress(blob), mtime=0)
