"""Runs a model's Python code against tests, in limited processes.

The limits keep faulty code from harming the program: time, memory, files, environment. They are no sandbox: the code can
use the network and read what the user can read. Run a model that you do not trust in a container. Linux and macOS only.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Sequence
from weakref import WeakKeyDictionary

MAX_OUTPUT_BYTES = 1 << 20
"""Of files that the code writes."""
HARNESS = """
import sys
token = sys.argv.pop()
source = sys.stdin.read()
scope = {"__name__": "__main__"}
exec(compile(source, "answer.py", "exec"), scope)
sys.stdout.write("\\n" + token)
"""
"""Writes the token only if the code and the test end without an error: exit() alone does not pass."""

_running: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
"""Limits the processes of each event loop."""


async def passed_tests(
    code: str, tests: Sequence[str], *, timeout_seconds: float = 5.0, memory_mb: int = 512
) -> float:
    """The share of tests that pass: each is Python that runs after the code, in a process of its own.

    A test passes if both end without an error within the limits. As many processes run at a time as there are cores.

    Raises:
        ValueError: there is no test.
    """
    if not tests:
        raise ValueError("passed_tests needs at least one test")
    sources = [f"{code}\n\n{test}\n" for test in tests]
    passed = await asyncio.gather(*(_run(each, timeout_seconds, memory_mb) for each in sources))
    return sum(passed) / len(tests)


async def _run(source: str, timeout_seconds: float, memory_mb: int) -> bool:
    token = secrets.token_hex(16)

    def limit() -> None:
        import resource  # Windows has no such module

        seconds = int(timeout_seconds) + 1
        for kind, value in (
            (resource.RLIMIT_CPU, seconds),
            (resource.RLIMIT_AS, memory_mb << 20),
            (resource.RLIMIT_FSIZE, MAX_OUTPUT_BYTES),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(kind, (value, value))

    slots = _running.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(os.cpu_count() or 1))
    async with slots:
        with tempfile.TemporaryDirectory() as folder:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-c", HARNESS, token),
                cwd=folder,
                env={},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=limit,
            )
            try:
                async with asyncio.timeout(timeout_seconds):
                    return await _passes(process, source, token)
            except TimeoutError:
                return False
            finally:
                _kill_session(process.pid)
                await _close(process)


async def _passes(process: asyncio.subprocess.Process, source: str, token: str) -> bool:
    assert process.stdin is not None and process.stdout is not None, "pipes"
    try:
        process.stdin.write(source.encode(errors="replace"))
        await process.stdin.drain()
    except ConnectionError:  # it ended before it read all
        return False
    process.stdin.close()
    last = b""
    while chunk := await process.stdout.read(1 << 16):
        last = (last + chunk)[-len(token) :]
    return await process.wait() == 0 and last == token.encode()


async def _close(process: asyncio.subprocess.Process) -> None:
    """Reads the rest of a killed process's output: only its end closes the pipe. A child in another session may hold it."""
    assert process.stdout is not None, "a pipe"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1):
            while await process.stdout.read(1 << 16):
                pass
    await process.wait()


def _kill_session(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
