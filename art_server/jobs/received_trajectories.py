"""The trajectories of a train or log request whose groups come one by one: what a model's folder keeps of them."""

from collections.abc import Sequence
from typing import Any

from art_protocol.history import pack_rows, trajectory_row, without_texts
from art_protocol.wire import TrajectoryGroupBody


class ReceivedTrajectories:
    """The content of a trajectories file, and what metrics need of its groups."""

    def __init__(self) -> None:
        self._rows: list[bytes] = []
        """Each row is compressed by itself."""
        self.outlines: list[TrajectoryGroupBody] = []
        """The groups without their conversations."""

    def add(self, group: TrajectoryGroupBody, turns: Sequence[Sequence[dict[str, Any]]] | None = None) -> None:
        """Packs a group (blocking); `turns` as in `trajectory_row`."""
        self._rows.append(pack_rows([trajectory_row(group, turns)]))
        self.outlines.append(without_texts(group))

    def keep_first(self, number: int) -> None:
        """Forgets all groups but the first ones."""
        del self._rows[number:], self.outlines[number:]

    @property
    def content(self) -> bytes:
        return b"".join(self._rows)
