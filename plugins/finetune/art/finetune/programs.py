"""Programs: a workflow or an evaluator in any language. JSON goes to standard input, and what the program prints is the result."""

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
from collections.abc import Mapping
from typing import Any

from art.finetune.errors import RolloutFailed

ERROR_CHARACTERS = 2000
"""Characters of the end of stderr that an error has."""
CAUSE = re.compile(r"\w*(Error|Exception)\b[^:]*:\s|^[\w.]*(Error|Exception)$")
"""A line that names what a program died of, in Python, JavaScript and Java. In JavaScript the lines of the stack come after it."""


def words_of(command: str | list[str]) -> list[str]:
    """The program and its arguments.

    Raises:
        ValueError: the command line has an open quote.
    """
    return shlex.split(command) if isinstance(command, str) else command


async def run_program(words: list[str], value: Any, environment: Mapping[str, str]) -> str:
    """What a program prints, without white space at both ends. The program gets a value as JSON on standard input. If this call is
    cancelled, the program is killed with all its children.

    Raises:
        RolloutFailed: the program ended with an error. The first line has the cause, and the others have the end of stderr.
    """
    starting = asyncio.create_task(
        asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
    )
    try:
        process = await asyncio.shield(starting)
        output, errors = await process.communicate(json.dumps(value, ensure_ascii=False, default=str).encode())
    finally:  # also if this call was cancelled while the program started
        process = await starting
        with contextlib.suppress(ProcessLookupError):  # the program and all its children have ended
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if process.returncode:
        tail = errors.decode(errors="replace").strip()[-ERROR_CHARACTERS:]
        raise RolloutFailed(f"{words[0]} ended with exit code {process.returncode}: {cause_of(tail)}\n{tail}".rstrip())
    return output.decode(errors="replace").strip()


def cause_of(tail: str) -> str:
    """The line of an error's text that has the cause: the last one that names an error, else the last one."""
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    causes = [line for line in lines if CAUSE.search(line)]
    return (causes or lines or ["it printed nothing on stderr"])[-1]
