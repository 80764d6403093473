"""Wrong uses: what a newcomer writes, what the answer has to contain, and the same with the remedy followed."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.waiting import PATIENCE_SECONDS

MAX_LINES = 25
"""Printed by a wrong use, on stdout and stderr together."""
LINES = "LINES"
"""In a template: where the lines of a use are."""


@dataclass(frozen=True, slots=True)
class Use:
    """A program or a command line. Its working directory has `files`."""

    name: str
    """What is wrong, in plain words."""
    wrong: str
    cause: str
    """A regular expression, which the output contains. The output of the mended form does not contain the cause."""
    remedy: str
    """A regular expression of the words that say what to do."""
    mended: str
    """The same with the remedy followed, as the words say it."""
    template: str = ""
    """The Python program around the lines; empty: a command line of bash."""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    is_warning: bool = False
    """The wrong form works, too."""
    first_sign: str = ""
    """Of a mended form that ends by a signal only: a regular expression of what it prints when it works."""

    def command(self, text: str, folder: Path) -> list[str]:
        """The words that run a form of the use in the folder."""
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)
        if not self.template:
            return ["bash", "-c", text]
        line = next(line for line in self.template.splitlines() if line.strip() == LINES)
        indented = textwrap.indent(text, line.removesuffix(LINES))
        (folder / "program.py").write_text(self.template.replace(line, indented))
        return [sys.executable, "program.py"]


@dataclass(frozen=True, slots=True)
class Ended:
    """What a process printed on stdout and stderr, and its exit status."""

    printed: str
    status: int

    @property
    def lines(self) -> list[str]:
        return [line for line in re.split(r"[\r\n]+", self.printed) if line.strip()]


def run(command: list[str], folder: Path, environment: Mapping[str, str], first_sign: str = "") -> Ended:
    """Runs a command to its end, or with `first_sign` until it has printed this, and then stops it."""
    output = folder / "printed"
    with output.open("wb") as stream:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=stream,
            stderr=stream,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while process.poll() is None:
            assert time.monotonic() < deadline, output.read_text()
            if first_sign and re.search(first_sign, output.read_text()):
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(PATIENCE_SECONDS)
                return Ended(output.read_text(), 0)
            time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return Ended(output.read_text(), process.returncode)
