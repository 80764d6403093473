"""The spans of a program, for a tracer that `trackers=[...]` names:

    step PROJECT/NAME              from the first rollout to the end of the train call
      rollout                      `art.rollout`
      train PROJECT/NAME           `model.train`

A span's link is the name of a rollout's session, or the idempotency key of a train call, so that every way to name a session
carries the link to the server.
"""

import atexit
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from art_protocol.tracking import Span, Tracer, has_tracer, open_tracer


class ProgramSpans:
    """The spans of a program. The rollouts of a model and the train call after them are in one trace: the trace of the
    program's current span, or else of a span "step"."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self._steps: dict[str, Span] = {}
        """The open spans "step", by model."""

    def rollout(self, model_id: str) -> Span:
        """The span of a rollout that begins."""
        parent = None
        if not self.tracer.has_current:
            if model_id not in self._steps:
                self._steps[model_id] = self.tracer.start(f"step {model_id}")
            parent = self._steps[model_id]
        return self.tracer.start("rollout", parent, {"art.model": model_id})

    @contextmanager
    def training(self, model_id: str) -> Generator[Span]:
        """The span of a train call, which ends the model's step."""
        step = self._steps.pop(model_id, None)
        parent = None if self.tracer.has_current else step
        try:
            with self.tracer.start(f"train {model_id}", parent) as span:
                yield span
        finally:
            if step is not None:
                step.end()

    def close(self) -> None:
        """Ends the open steps and delivers all spans (blocking, at most some seconds)."""
        while self._steps:
            self._steps.popitem()[1].end()
        self.tracer.close()


_program: ProgramSpans | None = None


def start_program(names: Sequence[str]) -> bool:
    """Switches the program's spans on, if one of the names is a tracer's; returns whether one is. Spans stay on until the
    program ends."""
    global _program
    if _program is None and (tracer := open_tracer(names, "art")) is not None:
        _program = ProgramSpans(tracer)
        atexit.register(close_program)
    return has_tracer(names)


def close_program() -> None:
    """Delivers the program's spans; takes some seconds at most (blocking). Further spans can follow."""
    if _program is not None:
        _program.close()


def start_rollout(model_id: str) -> Span | None:
    """The span of a rollout that begins; None if the program's spans are off."""
    return None if _program is None else _program.rollout(model_id)


@contextmanager
def training(model_id: str) -> Generator[str | None]:
    """The span of a train call. Yields its link; None if the program's spans are off."""
    if _program is None:
        yield None
        return
    with _program.training(model_id) as span:
        yield span.link
