"""Refused requests of sessions, counted by their cause, so that a rollout without answers can say why."""

from collections import Counter, OrderedDict

MAX_SESSIONS, MAX_CAUSES, MAX_CAUSE = 10_000, 8, 128
"""Sessions, causes of a session, and characters of a cause that `Refusals` remembers."""


class Refusals:
    """The number of refused requests by session and cause, such as a name that no model has. Only the latest sessions are
    remembered."""

    def __init__(self) -> None:
        self._causes: OrderedDict[tuple[str, str], Counter[str]] = OrderedDict()

    def add(self, owner: str, session: str, cause: str) -> None:
        causes = self._causes.setdefault((owner, session), Counter())
        self._causes.move_to_end((owner, session))
        if len(causes) < MAX_CAUSES or cause[:MAX_CAUSE] in causes:
            causes[cause[:MAX_CAUSE]] += 1
        while len(self._causes) > MAX_SESSIONS:
            self._causes.popitem(last=False)

    def of_session(self, owner: str, session: str) -> dict[str, int]:
        """The number of requests by cause."""
        return dict(self._causes.get((owner, session), {}))
