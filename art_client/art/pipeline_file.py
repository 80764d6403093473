"""What a pipeline has done, in a SQLite file of its program: the finished groups until they are trained, then their numbers.

A group is in the file before the group counts as finished, and a job's groups before the job is requested. A program that was
killed at any line continues from its file: finished groups are trained, running groups are sampled again, no group is trained
twice. Groups that the server refuses to train are given up, so that a corrected program continues, too.
"""

import contextlib
import sqlite3
import threading
import uuid
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

from art.errors import ArtError
from art.pacing import Open

FORMAT = 2
SCHEMA = """
CREATE TABLE pipeline (first_step INTEGER NOT NULL, evaluated INTEGER, job INTEGER, job_key TEXT, job_config TEXT);
CREATE TABLE groups (number INTEGER PRIMARY KEY, began INTEGER NOT NULL, job INTEGER, body TEXT);
"""
"""A job is named by the step at which it starts. `groups.job` is the job of a group, and `pipeline.job` is the job that may not
have ended. `job_key` is the idempotency key of `pipeline.job`. Each job has another key, because a step may need several jobs
until one job trains the groups. `body` is a group's JSON, and NULL when the group is trained. `evaluated` is the newest
evaluated step."""
FROM_FORMAT_1 = """
ALTER TABLE pipeline ADD COLUMN job_key TEXT;
UPDATE pipeline SET job_key = id || '-' || job;
ALTER TABLE pipeline DROP COLUMN id;
"""


class PipelineFile:
    """The file, which no other program can open meanwhile. Calls block for milliseconds; use `asyncio.to_thread`.

    Raises:
        ArtError: another program has the file open, or the file cannot be read.
    """

    def __init__(self, file: Path, step: int) -> None:
        """Opens the file, or makes the file of a pipeline that begins at a step."""
        self.path = file
        self._lock = threading.Lock()
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # SQLite would make a file that others can read, and gives the mode of this file to its journal.
        file.touch(mode=0o600)
        self._db = sqlite3.connect(file, timeout=0, isolation_level=None, check_same_thread=False)
        with contextlib.ExitStack() as undo:
            undo.callback(self._db.close)
            # The lock of the first transaction is then held until the connection is closed.
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            with self._transaction() as db:
                ((version,),) = db.execute("PRAGMA user_version").fetchall()
                changes = {0: SCHEMA, 1: FROM_FORMAT_1, FORMAT: ""}.get(version)
                if changes is None:
                    raise ArtError(
                        f"{file} was written by another version of art: use that version, or delete the file"
                    )
                # Not `executescript`, which first commits the transaction.
                for statement in changes.split(";"):
                    db.execute(statement)
                if version == 0:
                    db.execute("INSERT INTO pipeline (first_step) VALUES (?)", (step,))
                db.execute(f"PRAGMA user_version = {FORMAT}")
            undo.pop_all()

    def close(self) -> None:
        """Lets other programs open the file."""
        with self._lock:
            self._db.close()

    def first_step(self) -> int:
        """The model's step when the pipeline began."""
        return int(self._value("first_step"))

    def evaluated(self) -> int | None:
        """The newest evaluated step."""
        return self._value("evaluated")

    def job(self) -> int | None:
        """The job that may not have ended, by the step at which the job starts."""
        return self._value("job")

    def numbers(self) -> set[int]:
        """The numbers of all groups that have finished."""
        return {number for (number,) in self._rows("SELECT number FROM groups")}

    def waiting(self) -> list[Open]:
        """The finished groups that are in no job."""
        return [Open(*row) for row in self._rows("SELECT began, number FROM groups WHERE job IS NULL")]

    def read_job(self) -> tuple[str, str, list[str]]:
        """The idempotency key of the job that may not have ended, and the JSON of its configuration and groups, oldest first."""
        of_job = "SELECT body FROM groups WHERE job = (SELECT job FROM pipeline) ORDER BY began, number"
        return self._value("job_key"), self._value("job_config"), [body for (body,) in self._rows(of_job)]

    def add(self, group: Open, body: str) -> None:
        """Adds a finished group."""
        self._rows("INSERT INTO groups (number, began, body) VALUES (?, ?, ?)", group.number, group.began, body)

    def begin_job(self, step: int, groups: Iterable[Open], config: str) -> None:
        """Puts finished groups into the job that starts at a step, before it is requested."""
        with self._transaction() as db:
            db.executemany("UPDATE groups SET job = ? WHERE number = ?", [(step, group.number) for group in groups])
            values = step, uuid.uuid4().hex, config
            db.execute("UPDATE pipeline SET job = ?, job_key = ?, job_config = ?", values)

    def end_job(self) -> None:
        """Marks the groups of the job as trained."""
        self._settle("UPDATE groups SET body = NULL WHERE job = (SELECT job FROM pipeline)")

    def return_job(self) -> None:
        """Takes the groups out of the job again: the server does not have the job."""
        self._settle("UPDATE groups SET job = NULL WHERE job = (SELECT job FROM pipeline)")

    def give_up(self) -> int:
        """Deletes the job and all groups that are not trained, so that their scenarios are sampled again. Returns the number
        of groups."""
        return self._settle("DELETE FROM groups WHERE body IS NOT NULL")

    def forget(self, groups: Iterable[Open]) -> None:
        """Deletes finished groups, so that their scenarios are sampled again."""
        with self._transaction() as db:
            db.executemany("DELETE FROM groups WHERE number = ?", [(group.number,) for group in groups])

    def undo_after(self, step: int) -> int:
        """Deletes the groups that later steps have trained or sampled: the model was rolled back to this step, or made anew.
        Returns the number of these groups."""
        with self._transaction() as db:
            deleted = db.execute("DELETE FROM groups WHERE job >= ? OR began > ?", (step, step)).rowcount
            db.execute("UPDATE pipeline SET first_step = MIN(first_step, ?)", (step,))
            db.execute("UPDATE pipeline SET evaluated = NULL WHERE evaluated > ?", (step,))
        return deleted

    def set_evaluated(self, step: int) -> None:
        self._rows("UPDATE pipeline SET evaluated = ?", step)

    def _settle(self, statement: str) -> int:
        with self._transaction() as db:
            num_groups = db.execute(statement).rowcount
            db.execute("UPDATE pipeline SET job = NULL, job_key = NULL, job_config = NULL")
        return num_groups

    def _value(self, column: str) -> Any:  # Any: a column's value
        ((value,),) = self._rows(f"SELECT {column} FROM pipeline")
        return value

    def _rows(self, statement: str, *values: object) -> list[Any]:
        with self._transaction() as db:
            return db.execute(statement, values).fetchall()

    @contextlib.contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection]:
        try:
            with self._lock:
                self._db.execute("BEGIN EXCLUSIVE")
                try:
                    yield self._db
                    self._db.execute("COMMIT")
                finally:
                    if self._db.in_transaction:
                        self._db.execute("ROLLBACK")
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise ArtError(
                    f"another program runs this pipeline: it has {self.path} open. Stop it, or wait until it ends"
                ) from error
            raise ArtError(f"{self.path} cannot be used: {error}") from error
        except sqlite3.DatabaseError as error:
            raise ArtError(f"{self.path} is damaged ({error}): delete it; its pipeline then begins anew") from error
