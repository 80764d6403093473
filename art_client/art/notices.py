"""Messages to a program about its jobs and its end: sentences with number, reason and remedy, each logged once."""

import functools
import logging
import re
import sys
from traceback import walk_tb
from types import TracebackType
from typing import NoReturn

from tqdm.auto import tqdm

from art.errors import ArtError
from art.pool import format_numbers, set_total
from art.tracebacks import OURS, is_own, package_of, shorten
from art_protocol.wire import JobEvent, JobReport

logger = logging.getLogger(__name__)

MAX_EXAMPLES = 3


class Notices:
    """The notices about one backend's jobs. A notice that differs from an earlier one only in its numbers is logged as
    information, not as a warning."""

    def __init__(self) -> None:
        self._logged: set[str] = set()
        """The notices that were logged, without their numbers."""

    def job(self, report: JobReport) -> None:
        """Logs what the job left out, and the server's notes."""
        left_out = left_out_sentence(report)
        if left_out is not None and not report.num_trajectories_trained:
            logger.warning("train: %s", left_out)  # at each step: a run can stay so
        elif left_out is not None:
            self._log("; ".join(dropped.reason for dropped in report.dropped), left_out)
        for difference in report.differences:
            advice = "An agent that sends earlier messages back unchanged gets one sequence"
            self._log(difference.whose, f"{difference}. {advice}")
        for note in report.notes:
            self._log(note, note)

    def _log(self, kind: str, text: str) -> None:
        kind = re.sub(r"\d+", "#", kind)
        logger.log(logging.INFO if kind in self._logged else logging.WARNING, "train: %s", text)
        self._logged.add(kind)


def left_out_sentence(report: JobReport) -> str | None:
    """How many trajectories were trained, and why the others were not; None if nothing was left out."""
    if not report.dropped:
        return None
    trained, total = report.num_trajectories_trained, report.num_trajectories
    parts = "; ".join(map(str, report.dropped))
    text = f"{trained} of {total} trajectories trained. Left out: {parts}."
    examples = [path for dropped in report.dropped for path in dropped.examples][:MAX_EXAMPLES]
    return text + (f" For example {', '.join(examples)}." if examples else "")


@functools.cache
def shorten_errors() -> None:
    """From now on, an error that ends the program is printed with the program's own frames only, if the program's own line raised
    the error, or if `art` raised it as a sentence about an argument or a server. Other errors are printed whole."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        frames = [frame for frame, _ in walk_tb(traceback)]
        is_sentence = isinstance(error, (ArtError, ValueError, TypeError))
        if frames and (is_own(frames[-1]) or (is_sentence and package_of(frames[-1]) in OURS)):
            logger.debug("the error, with all frames", exc_info=(kind, error, traceback))
            shorten(error, traceback)
            traceback = error.__traceback__
        previous(kind, error, traceback)

    sys.excepthook = hook


def interrupted(where: str, steps: dict[str, int], accepted: dict[str, int]) -> None:
    """Prepares for Ctrl-C: a KeyboardInterrupt that ends the program then prints what is saved, not a traceback. `accepted`
    has the step that each model's accepted jobs will still make."""
    saved = ", ".join(f"{name} at step {step}" for name, step in sorted(steps.items()))
    coming = ", ".join(f"step {step} of {name}" for name, step in sorted(accepted.items()))
    line = f"art: stopped. {where} has {saved}. The next run continues from there."
    if coming:
        line += f" A job is accepted and will make {coming}, also without this program."
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print(f"\n{line}", file=sys.stderr)
        else:
            previous(kind, error, traceback)

    sys.excepthook = hook


def show_event(bar: "tqdm[NoReturn]", event: JobEvent) -> None:
    """Shows a job's progress in its bar."""
    if event.phase is not None:
        bar.set_description_str(f"train ({event.phase})", refresh=False)
    if event.total is not None:
        set_total(bar, event.total)
    if event.completed is not None:
        bar.n = event.completed
    if event.event == "progress":
        bar.set_postfix_str(format_numbers(event.metrics), refresh=False)
    bar.refresh()
