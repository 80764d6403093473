"""Opens SQLite files with equal settings, and translates their errors into the server's."""

import contextlib
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from art_server.errors import StorageFull, Unavailable, UsageError

LOCK_SECONDS = 0.1
"""How long a write waits for another program (a backup, a shell) that locks the file. Short, because some writes block
the event loop; the job runner retries after a pause."""


def open_database(file: Path | None, schema: str, *, is_durable: bool) -> sqlite3.Connection:
    """Returns a connection for all threads, in autocommit mode. With `is_durable` a commit survives a power loss.
    `file` None: a temporary database.

    Raises:
        UsageError: a table of the file lacks a column.
    """
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
    # "" is SQLite's name for a temporary file.
    database = sqlite3.connect(file or "", timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False)
    database.row_factory = sqlite3.Row
    database.execute("PRAGMA journal_mode=WAL")
    database.execute(f"PRAGMA synchronous={'FULL' if is_durable else 'NORMAL'}")
    try:
        database.executescript(schema)
    except sqlite3.OperationalError as error:
        database.close()
        # An index of the schema is on a column that the file's table lacks.
        if "no such column" in str(error):
            raise unread_version(str(file)) from error
        raise
    return database


def unread_version(what: str) -> UsageError:
    """The refusal of a database whose tables are of another version."""
    return UsageError(
        f"{what} was written by a version of art-server that this version cannot read: use another --path"
    )


def column_names(database: sqlite3.Connection, table: str, schema: str = "main") -> set[str]:
    """The columns of a table; none if it does not exist. `schema` is the name of an attached database."""
    return {row[1] for row in database.execute(f"PRAGMA {schema}.table_info({table})")}


def insert(
    database: sqlite3.Connection,
    table: str,
    row: Mapping[str, object],
    or_else: Literal["ABORT", "IGNORE", "REPLACE"] = "ABORT",
) -> int:
    """Inserts a row (column to value) and returns its rowid."""
    marks = ",".join("?" * len(row))
    statement = f"INSERT OR {or_else} INTO {table} ({','.join(row)}) VALUES ({marks})"
    return database.execute(statement, tuple(row.values())).lastrowid or 0


@contextlib.contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Commits all statements of the block, or none."""
    # SQLite waits here for another program's lock; a transaction that begins as a reader can fail at its first write, at once.
    database.execute("BEGIN IMMEDIATE")
    with database:
        yield


@contextlib.contextmanager
def overwriting(database: sqlite3.Connection) -> Iterator[None]:
    """What the block deletes is overwritten in the file and its log, instead of left until SQLite uses the pages again."""
    ((default,),) = database.execute("PRAGMA secure_delete").fetchall()  # it depends on SQLite's build
    database.execute("PRAGMA secure_delete=ON")
    try:
        yield
    finally:
        database.execute(f"PRAGMA secure_delete={default}")
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")


class Database:
    """A database that several threads share: one change runs at a time. Reads wait for no change, because the event loop reads,
    and a large job takes long to write."""

    def __init__(self, connection: sqlite3.Connection, file: Path | None):
        """`connection` has opened `file`; None: a temporary database, whose reads wait for its changes."""
        self.connection = connection
        self.lock = threading.RLock()
        self._reading, self._reading_lock = connection, self.lock
        if file is not None:
            self._reading, self._reading_lock = open_database(file, "", is_durable=True), threading.RLock()
        self._changing_thread: int | None = None

    def close(self) -> None:
        with self.lock, self._reading_lock:
            self._reading.close()
            self.connection.close()

    def select(self, statement: str, *values: object) -> list[Any]:  # Any: rows of the statement's columns
        """What is committed, and inside `changes` also what the block has changed."""
        if self._changing_thread == threading.get_ident():
            return self.connection.execute(statement, values).fetchall()
        with self._reading_lock:
            return self._reading.execute(statement, values).fetchall()

    @contextlib.contextmanager
    def changes(self, what: str) -> Iterator[sqlite3.Connection]:
        """Inside the block all statements of this thread are one transaction. A block within a block belongs to the outer
        block's transaction.

        Raises:
            StorageFull: the disk is full, read-only or broken.
            Unavailable: another program locks the file.
        """
        with self.lock:
            if self.connection.in_transaction:
                yield self.connection
                return
            with database_errors(what), transaction(self.connection):
                self._changing_thread = threading.get_ident()
                try:
                    yield self.connection
                finally:
                    self._changing_thread = None


@contextlib.contextmanager
def database_errors(what: str) -> Iterator[None]:
    """Translates SQLite's errors inside the block.

    Raises:
        StorageFull: the disk is full, read-only or broken.
        Unavailable: another program locks the file.
    """
    try:
        yield
    except sqlite3.OperationalError as error:
        if "locked" in str(error) or "busy" in str(error):
            raise Unavailable(
                f"another program locks the database for {what}: repeat the request",
                code="database_locked",
            ) from error
        raise StorageFull(
            f"cannot write {what} to the disk ({error}): free some space under the server's --path, check that it is "
            "writable, and repeat the request",
            code="no_disk_space",
        ) from error
