"""The table of models: the number of each registered model, and what its folder has yet to follow.

A rename and a rollback are committed here, in one transaction with the model's metrics and jobs. The model's folder follows: a
row says which folder is to get the model's name, and behind which step the checkpoints are to be set aside. The registry does
both after the commit (`Registry.settle`), and again after the start of a server that follows a killed one.
"""

from dataclasses import dataclass, fields

from art_server.store.database import Database, insert
from art_server.store.model_folder import ModelRecord


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model that is not deleted."""

    model: int
    """The model's number."""
    project: str
    name: str
    registered_at: float
    folder: str
    """The name of the model's folder: the model's name, but while a rename moves the folder."""
    rolled_back_to: int | None
    """The step behind which a rollback has yet to set the checkpoints aside; None: no rollback is on its way."""


COLUMNS = ", ".join(column.name for column in fields(ModelRow))


class ModelTable:
    """The rows. Several changes inside `Database.changes` are one transaction."""

    def __init__(self, database: Database):
        self._database = database

    def rows(self) -> list[ModelRow]:
        """All models that are not deleted."""
        return [ModelRow(*row) for row in self._database.select(f"SELECT {COLUMNS} FROM models WHERE NOT is_deleted")]

    def read(self, model: int) -> ModelRow:
        (row,) = self._database.select(f"SELECT {COLUMNS} FROM models WHERE model = ?", model)
        return ModelRow(*row)

    def name_of(self, model: int) -> str:
        """PROJECT/NAME of a model that may be deleted."""
        query = "SELECT project || '/' || name || iif(is_deleted, ' (deleted)', '') FROM models WHERE model = ?"
        return self._database.select(query, model)[0][0]

    def number_of(self, project: str, name: str) -> int:
        """The number of the model with this name; without such a model that of a deleted model, which is new if none is
        known."""
        with self._database.changes("the model") as connection:
            where = "project = ? AND name = ? ORDER BY is_deleted, model DESC"
            for (model,) in self._database.select(f"SELECT model FROM models WHERE {where}", project, name):
                return model
            row = {"project": project, "name": name, "folder": name, "registered_at": 0.0, "is_deleted": 1}
            return insert(connection, "models", row)

    def add(self, record: ModelRecord) -> int:
        """Gives a new model its number. If a row has this name, the folder of the row's model was deleted or replaced, and the
        row becomes a deleted model's."""
        with self._database.changes("the model") as connection:
            self._free(record.project, record.name)
            row = {
                "project": record.project,
                "name": record.name,
                "registered_at": record.created_at,
                "folder": record.name,
            }
            return insert(connection, "models", row)

    def rename(self, model: int, name: str) -> None:
        """Gives a model another name, as `add` does."""
        with self._database.changes("the model"):
            self._free(self.read(model).project, name)
            self._change("UPDATE models SET folder = name, name = ? WHERE model = ?", name, model)

    def roll_back(self, model: int, step: int) -> None:
        """Notes that the checkpoints behind a step are to be set aside."""
        self._change("UPDATE models SET rolled_back_to = ? WHERE model = ?", step, model)

    def settle(self, model: int) -> None:
        """Notes that the model's folder is as the row says."""
        self._change("UPDATE models SET folder = name, rolled_back_to = NULL WHERE model = ?", model)

    def delete(self, model: int) -> None:
        """Deletes a model's metrics. The model's row stays, because jobs refer to it."""
        with self._database.changes("the model") as connection:
            for table in ("steps", "metrics"):
                connection.execute(f"DELETE FROM {table} WHERE model = ?", (model,))
            connection.execute("UPDATE models SET is_deleted = 1 WHERE model = ?", (model,))

    def _free(self, project: str, name: str) -> None:
        where = "project = ? AND name = ? AND NOT is_deleted"
        for (model,) in self._database.select(f"SELECT model FROM models WHERE {where}", project, name):
            self.delete(model)

    def _change(self, statement: str, *values: object) -> None:
        with self._database.changes("the model") as connection:
            connection.execute(statement, values)
