"""What the server does now, sampled four times a second: where the time of the last minutes went, and what would save time."""

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Literal

Doing = Literal["rollouts", "training", "swap", "starting", "waiting"]
"""rollouts: the engine samples. training: the trainer computes, on the shared device or its own. swap: a step is written or
loaded. starting: the engine starts. waiting: requests wait at the pause gate or for the engine."""

SAMPLE_SECONDS = 0.25
WINDOW_SECONDS = 600.0
ADVICE: dict[str, str] = {
    "rollouts": "the engine samples. More rollouts at a time, shorter answers or another GPU shorten it",
    "training": "the trainer computes. Fewer or shorter rollouts per step, or more tokens at a time, shorten it",
    "swap": "steps are written and loaded. A faster disk or a lower LoRA rank shortens it",
    "starting": "the engine starts",
    "idle": "the server waits for your program: its tools, its scoring, or too few rollouts at a time",
}
ABSENT_SECONDS = 60.0
"""After this time without a request or a job the program may be gone, so the report no longer says that the server waits for a
program."""


class Activity:
    """Samples what the server does while `run` runs."""

    def __init__(self, look: Callable[[], frozenset[Doing]]):
        self._look = look
        self._samples: deque[frozenset[Doing]] = deque(maxlen=int(WINDOW_SECONDS / SAMPLE_SECONDS))

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            self._samples.append(self._look())
            await asyncio.sleep(SAMPLE_SECONDS)

    def report(self) -> dict[str, Any]:
        """The number of sampled seconds, each activity's share of these seconds, and one sentence on the largest share.

        With separate devices, rollouts and training overlap, so that the shares add up to more than 1.
        """
        samples = list(self._samples)
        counts = Counter(doing for sample in samples for doing in sample or ("idle",))
        counts["idle"] += sum(sample == {"waiting"} for sample in samples)
        shares = {name: counts[name] / max(1, len(samples)) for name in (*ADVICE, "waiting")}
        largest = max(ADVICE, key=lambda name: shares[name])
        seconds = len(samples) * SAMPLE_SECONDS
        silent = SAMPLE_SECONDS * len(list(itertools.takewhile(lambda sample: not sample, reversed(samples))))
        advice = ADVICE[largest]
        if largest == "idle" and (silent > ABSENT_SECONDS or silent == seconds):
            advice = f"no program uses the server, or its own work takes long: no request for {duration(silent)}"
        return {
            "seconds": seconds,
            "shares": shares,
            "largest": largest,
            "sentence": f"{shares[largest]:.0%} of the last {duration(seconds)}: {advice}",
        }


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
