"""Gives the records of an earlier server's ledger, which name their models, the numbers of these models."""

import contextlib
import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path

from art_server.ledger.storage import LOST_CHOICES
from art_server.store.database import column_names, open_database, transaction

logger = logging.getLogger(__name__)

CHANGED_AT_A_TIME = 5000
"""Records that get their number in one transaction."""


def number_records(file: Path, number_of: Callable[[str, str], int]) -> None:
    """Gives each record the number of its model, and each count of lost choices. `number_of` returns the number of project and
    name. Does nothing without a file of an earlier server; after a crash a second call does the rest."""
    if not file.exists():
        return
    with contextlib.closing(open_database(file, "", is_durable=False)) as database:
        if "name" in column_names(database, "records") and "model" not in column_names(database, "lost_choices"):
            logger.info("the ledger's records get the numbers of their models")
            _number(database, number_of)


def _number(database: sqlite3.Connection, number_of: Callable[[str, str], int]) -> None:
    has_lost = bool(column_names(database, "lost_choices"))
    lost = "UNION SELECT project, name FROM lost_choices" if has_lost else ""
    names = f"SELECT DISTINCT project, name FROM records WHERE name IS NOT NULL {lost}"
    numbers = [(*row, number_of(*row)) for row in database.execute(names).fetchall()]
    database.execute("CREATE TEMP TABLE numbers (project TEXT, name TEXT, model INTEGER, PRIMARY KEY (project, name))")
    database.executemany("INSERT INTO numbers VALUES (?, ?, ?)", numbers)
    if "model" not in column_names(database, "records"):
        database.execute("ALTER TABLE records ADD COLUMN model INTEGER")
    (last,) = database.execute("SELECT COALESCE(MAX(number), 0) FROM records").fetchone()
    for start in range(0, last + 1, CHANGED_AT_A_TIME):
        database.execute(
            "UPDATE records SET model = numbers.model FROM numbers WHERE records.project = numbers.project"
            " AND records.name = numbers.name AND records.model IS NULL AND number >= ? AND number < ?",
            (start, start + CHANGED_AT_A_TIME),
        )
    with transaction(database):  # last: its column says that all is done
        if has_lost:
            database.execute("ALTER TABLE lost_choices RENAME TO named_choices")
        database.execute(LOST_CHOICES)
        if has_lost:
            database.execute(
                "INSERT INTO lost_choices SELECT number, session, model, reason, num_choices"
                " FROM named_choices JOIN numbers USING (project, name)"
            )
            database.execute("DROP TABLE named_choices")
