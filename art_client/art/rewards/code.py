"""Runs a model's Python code against tests, in limited processes.

The limits keep faulty code from harming the program: time, memory, files, environment. They are no sandbox: the code can
use the network and read what the user can read. Run a model that you do not trust in a container. Linux only.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

MAX_OUTPUT_BYTES = 1 << 20
"""Of files that the code writes."""
HARNESS = """
import os, resource, sys
_, token, verdict, *limits = sys.argv
write = os.write
os.set_inheritable(int(verdict), False)
for kind, value in zip(("CPU", "AS", "FSIZE", "CORE"), map(int, limits), strict=True):
    resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (value, value))
del sys.argv[1:]
source = sys.stdin.read()
scope = {"__name__": "__main__"}
exec(compile(source, "answer.py", "exec"), scope)
write(int(verdict), token.encode())
"""
"""Sets the limits itself: a function between fork and exec could hang in a program with threads. Writes the token only if the code and the test end without an error: exit() alone does not pass. The token has a file of its own: the code may replace its output, or leave a process that holds it open."""
MARK = "ART_CODE_RUN"
"""A variable in the environment of the code's processes, by which those that left its session are found."""
MAX_SCANS = 50
"""A killed process takes a moment to end, and may have started another one before."""

_running: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
"""Limits the processes of each event loop."""


async def passed_tests(
    code: str, tests: Sequence[str], *, timeout_seconds: float = 5.0, memory_mb: int = 512
) -> float:
    """The share of tests that pass: each is Python that runs after the code, in a process of its own.

    A test passes if both end without an error within the limits. As many processes run at a time as there are cores.

    Raises:
        ValueError: there is no test.
        RuntimeError: this is not Linux, whose limits it needs.
    """
    if sys.platform != "linux":
        raise RuntimeError(f"passed_tests needs Linux, and this is {sys.platform}: use a container")
    if not tests:
        raise ValueError("passed_tests needs at least one test")
    sources = [f"{code}\n\n{test}\n" for test in tests]
    passed = await asyncio.gather(*(_run(each, timeout_seconds, memory_mb) for each in sources))
    return sum(passed) / len(tests)


async def _run(source: str, timeout_seconds: float, memory_mb: int) -> bool:
    token, mark = secrets.token_hex(16), secrets.token_hex(16)
    limits = (int(timeout_seconds) + 1, memory_mb << 20, MAX_OUTPUT_BYTES, 0)
    slots = _running.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(os.cpu_count() or 1))
    async with slots:
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
            tempfile.TemporaryFile() as verdict,
        ):
            number = verdict.fileno()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-c", HARNESS, token, str(number), *map(str, limits)),
                cwd=folder,
                env={MARK: mark},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                pass_fds=(number,),
                start_new_session=True,
            )
            try:
                async with asyncio.timeout(timeout_seconds):
                    if not await _ends_well(process, source):
                        return False
                verdict.seek(0)
                return token.encode() in verdict.read()
            except TimeoutError:
                return False
            finally:
                await asyncio.to_thread(_kill_all, process.pid, f"{MARK}={mark}".encode())
                await process.wait()


async def _ends_well(process: asyncio.subprocess.Process, source: str) -> bool:
    assert process.stdin is not None, "a pipe"
    try:
        process.stdin.write(source.encode(errors="replace"))
        await process.stdin.drain()
    except ConnectionError:  # it ended before it read all
        return False
    process.stdin.close()
    return await process.wait() == 0


def _kill_all(leader: int, mark: bytes) -> None:
    """Kills a session, and the processes with this variable in any session, until no scan finds one (blocking)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    for _ in range(MAX_SCANS):
        if not sum(_kill_if_marked(each, mark) for each in os.listdir("/proc") if each.isdecimal()):
            return
        time.sleep(0.02)


def _kill_if_marked(process: str, mark: bytes) -> bool:
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        if mark in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
            os.kill(int(process), signal.SIGKILL)
            return True
    return False
