"""How many scores a key and a browser's token may send in a minute. The counts are in memory, so a start begins at zero."""

import math
from collections import Counter

from art_server.errors import TooMany
from art_server.shared.clock import REAL, Clock

PER_KEY = 60_000
"""More than the server takes on a small machine, so only a program in a loop meets it: a million imported scores take 17 minutes."""
PER_TOKEN = 10
"""A person changes a mind less often. Each change leaves a row of some hundred bytes."""
SECONDS = 60.0


class ScoreRates:
    """Counts scores by sender in each minute of the clock. For the event loop only."""

    def __init__(self, clock: Clock = REAL):
        self._clock = clock
        self._minute = -1
        self._counts = Counter[str]()

    def count(self, sender: str, number: int, most: int) -> None:
        """Counts scores of a sender, who may send `most` in a minute.

        Raises:
            TooMany: these would be more; none is counted.
        """
        minute, second = divmod(self._clock.now(), SECONDS)
        if minute != self._minute:
            self._minute = minute
            self._counts.clear()
        if self._counts[sender] + number > most:
            wait_seconds = math.ceil(SECONDS - second)
            raise TooMany(
                f"more than {most:,} scores in a minute: send these again in {wait_seconds} s",
                code="too_many_scores",
                wait_seconds=wait_seconds,
            )
        self._counts[sender] += number
