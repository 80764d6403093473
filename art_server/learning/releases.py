"""The table of releases: which step serves while a model's newer steps are trained, guarded and tried.

    steps -> steps                  a step has passed the guard, or was refused and set aside
    steps -> promoted               `direct`: the newest step has passed the guard, and serves
    steps -> canary                 enough steps: the newest one answers a share of the requests
    canary -> promoted              the candidate's users were more content
    steps, canary -> rolled_back    the release's steps are set aside; the incumbent serves as before

While a release is open, `Registry` has the incumbent serve, also after a restart. Each arrow is one transaction. A rollback is in the
transaction of the model's rollback (`Checkpoints.roll_back`).
"""

from dataclasses import dataclass, fields

from art_protocol.learning import ReleaseState
from art_server.shared.clock import REAL, Clock
from art_server.store.database import Database, insert


@dataclass(frozen=True, slots=True)
class Release:
    """A row."""

    number: int
    model: int
    state: ReleaseState
    incumbent: int
    passed: int
    candidate: int | None
    share: float | None
    num_refused: int
    num_looks: int
    reason: str | None
    began_at: float
    split_at: float | None
    ended_at: float | None


MAX_REFUSED = 3
"""After so many refused steps in a row the release ends, and learning pauses."""
COLUMNS = ", ".join(column.name for column in fields(Release))


class Releases:
    """The table. Calls block for a few milliseconds. A model is named by its number."""

    def __init__(self, database: Database, *, clock: Clock = REAL):
        self._database = database
        self._clock = clock

    def open(self, model: int) -> Release | None:
        """The release of a model that is not decided yet."""
        return next(iter(self._rows("model = ? AND ended_at IS NULL", model)), None)

    def newest(self, model: int) -> Release | None:
        return next(iter(self._rows("model = ? ORDER BY number DESC LIMIT 1", model)), None)

    def all_open(self) -> list[Release]:
        return self._rows("ended_at IS NULL")

    def _rows(self, where: str, *values: object) -> list[Release]:
        return [
            Release(*row) for row in self._database.select(f"SELECT {COLUMNS} FROM releases WHERE {where}", *values)
        ]

    def begin(self, model: int, incumbent: int) -> None:
        """Opens a release, if none is open."""
        with self._database.changes("the release") as connection:
            if self.open(model) is None:
                row = {"model": model, "state": "steps", "incumbent": incumbent, "passed": incumbent}
                insert(connection, "releases", row | {"began_at": self._clock.now()})

    def note_passed(self, release: Release, step: int) -> None:
        """Notes that a step has passed the guard."""
        self._change(release, "passed = ?, num_refused = 0", step)

    def note_refused(self, release: Release, reason: str) -> None:
        """Notes that the guard has refused a step, before the step is set aside."""
        self._change(release, "num_refused = num_refused + 1, reason = ?", reason)

    def split(self, release: Release, candidate: int, share: float) -> None:
        """Begins the canary."""
        changes = "state = 'canary', candidate = ?, share = ?, reason = NULL, split_at = ?"
        self._change(release, changes, candidate, share, self._clock.now())

    def note_look(self, release: Release, num_looks: int) -> None:
        """Notes that the looks so far have decided nothing."""
        self._change(release, "num_looks = ?", num_looks)

    def note_reason(self, release: Release, reason: str) -> None:
        """Writes down why a release is about to be rolled back."""
        self._change(release, "reason = ?", reason)

    def promote(self, release: Release, reason: str) -> None:
        self._change(release, "state = 'promoted', reason = ?, ended_at = ?", reason, self._clock.now())

    def roll_back(self, model: int, step: int) -> None:
        """Follows a rollback of the model, in the caller's transaction. A release whose step has to go ends; one that loses only a
        step which the guard has refused goes on."""
        release = self.open(model)
        if release is None or (
            release.state == "steps" and step >= release.passed and release.num_refused < MAX_REFUSED
        ):
            return
        reason = release.reason or f"somebody has rolled the model back to step {step}"
        self.end(release, reason)

    def end(self, release: Release, reason: str) -> None:
        """Ends a release whose steps are set aside; nothing, if it has ended."""
        self._change(release, "state = 'rolled_back', reason = ?, ended_at = ?", reason, self._clock.now())

    def _change(self, release: Release, changes: str, *values: object) -> None:
        with self._database.changes("the release") as connection:
            statement = f"UPDATE releases SET {changes} WHERE number = ? AND ended_at IS NULL"
            connection.execute(statement, (*values, release.number))
