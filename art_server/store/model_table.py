"""The table of models: the number of each registered model, and what its folder has yet to follow.

A rename and a rollback are committed here, in one transaction with the model's metrics and jobs. The model's folder follows: a
row says which folder is to get the model's name, and behind which step the checkpoints are to be set aside. The registry does
both after the commit, and what is left at the start of the next server (`Registry._follow`).
"""

import secrets
import sqlite3
from dataclasses import dataclass, fields

from art_server.store.database import Database, insert
from art_server.store.model_folder import ModelRecord


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model's row, without whether the model is deleted."""

    model: int
    """The model's number."""
    project: str
    name: str
    registered_at: float
    folder: str
    """The name of the model's folder: the model's name, but until a rename has moved the folder."""
    rolled_back_to: int | None
    """The step behind which a rollback has yet to set the checkpoints aside; None: no rollback is on its way."""


COLUMNS = ", ".join(column.name for column in fields(ModelRow))
NUMBER_BITS = 53
"""Of a model's number: the largest integers that every program that reads the database has."""


def insert_model(
    connection: sqlite3.Connection, project: str, name: str, registered_at: float = 0.0, *, is_deleted: bool = False
) -> int:
    """Adds a model's row, and returns the model's number. The number is random, so that it is new also to the ledger if the
    server's database was lost, or is an old backup."""
    row = {
        "model": secrets.randbits(NUMBER_BITS),
        "project": project,
        "name": name,
        "folder": name,
        "registered_at": registered_at,
        "is_deleted": is_deleted,
    }
    return insert(connection, "models", row)


class ModelTable:
    """The rows. Several changes inside `Database.changes` are one transaction."""

    def __init__(self, database: Database):
        self._database = database

    def rows(self) -> list[ModelRow]:
        """All models that are not deleted."""
        return [ModelRow(*row) for row in self._database.select(f"SELECT {COLUMNS} FROM models WHERE NOT is_deleted")]

    def rows_by_folder(self) -> dict[tuple[str, str, float], ModelRow]:
        """`rows` by project, name of the folder, and time of the registration, which tells a model from others of its name. A
        folder that has yet to follow a rename may have either name."""
        rows = self.rows()
        by_folder = {(row.project, row.folder, row.registered_at): row for row in rows}
        return by_folder | {(row.project, row.name, row.registered_at): row for row in rows}

    def read(self, model: int) -> ModelRow:
        (row,) = self._database.select(f"SELECT {COLUMNS} FROM models WHERE model = ?", model)
        return ModelRow(*row)

    def incumbents(self) -> dict[int, int]:
        """The step that serves, for each model whose newer steps are a release that is not decided yet."""
        return dict(map(tuple, self._database.select("SELECT model, incumbent FROM releases WHERE ended_at IS NULL")))

    def name_of(self, model: int) -> str:
        """PROJECT/NAME of a model that may be deleted; "(unknown)" for a number that only a lost database had."""
        query = "SELECT project || '/' || name || iif(is_deleted, ' (deleted)', '') FROM models WHERE model = ?"
        rows = self._database.select(query, model)
        return rows[0][0] if rows else "(unknown)"

    def number_of(self, project: str, name: str) -> int:
        """The number of the model with this name; without such a model that of a deleted model, which is new if none is
        known."""
        with self._database.changes("the model") as connection:
            where = "project = ? AND name = ? ORDER BY is_deleted, registered_at DESC"
            for (model,) in self._database.select(f"SELECT model FROM models WHERE {where}", project, name):
                return model
            return insert_model(connection, project, name, is_deleted=True)

    def add(self, record: ModelRecord) -> int:
        """Gives a new model its number. If a row has this name, the folder of the row's model was deleted or replaced, and the
        row becomes a deleted model's."""
        with self._database.changes("the model") as connection:
            self._free(record.project, record.name)
            return insert_model(connection, record.project, record.name, record.created_at)

    def rename(self, model: int, name: str, folder: str) -> None:
        """Gives a model another name, as `add` does. `folder` is the name of the model's folder, which is yet to move."""
        with self._database.changes("the model"):
            self._free(self.read(model).project, name)
            self._change("UPDATE models SET folder = ?, name = ? WHERE model = ?", folder, name, model)

    def roll_back(self, model: int, step: int) -> None:
        """Notes that the checkpoints behind a step are to be set aside."""
        self._change("UPDATE models SET rolled_back_to = ? WHERE model = ?", step, model)

    def note_moved(self, model: int) -> None:
        """Notes that the model's folder has the model's name."""
        self._change("UPDATE models SET folder = name WHERE model = ?", model)

    def note_set_aside(self, model: int) -> None:
        """Notes that the checkpoints behind the step of a rollback are set aside."""
        self._change("UPDATE models SET rolled_back_to = NULL WHERE model = ?", model)

    def delete(self, model: int) -> None:
        """Deletes a model's metrics and scores, and marks the model's row as deleted. The row stays, because jobs refer to it."""
        with self._database.changes("the model") as connection:
            for table in ("steps", "metrics", "scores", "learning", "releases"):
                connection.execute(f"DELETE FROM {table} WHERE model = ?", (model,))
            connection.execute("UPDATE models SET is_deleted = 1 WHERE model = ?", (model,))

    def _free(self, project: str, name: str) -> None:
        where = "project = ? AND name = ? AND NOT is_deleted"
        for (model,) in self._database.select(f"SELECT model FROM models WHERE {where}", project, name):
            self.delete(model)

    def _change(self, statement: str, *values: object) -> None:
        with self._database.changes("the model") as connection:
            connection.execute(statement, values)
