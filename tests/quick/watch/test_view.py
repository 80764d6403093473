"""`art view`: the page over a folder, as a process."""

import contextlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from art_server.errors import UsageError
from art_watch.view import view
from tests.makers.demo import make_demo
from tests.waiting import PATIENCE_SECONDS

SERVER_PACKAGES = [
    "aiohttp",
    "fsspec",
    "huggingface_hub",
    "jinja2",
    "matplotlib",
    "msgspec",
    "peft",
    "prometheus_client",
    "tokenizers",
    "torch",
    "transformers",
    "uvloop",
    "vllm",
]


@contextlib.contextmanager
def opened_stream(url: str, seconds: float = PATIENCE_SECONDS) -> Iterator[httpx.Response]:
    """A stream of a server that is starting."""
    stop = time.monotonic() + seconds
    while True:
        try:
            with httpx.stream("GET", url) as stream:
                yield stream
                return
        except httpx.ConnectError:
            assert time.monotonic() < stop
            time.sleep(0.05)


@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGINT for a child")
def test_ctrl_c_ends_a_view_with_open_pages_quietly(tmp_path: Path) -> None:
    make_demo(tmp_path, runs=1, steps=1, rollouts=8)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = f"""
from pathlib import Path
from art_watch.view import view
view(Path({str(tmp_path)!r}), {port}, opens_browser=False)
"""
    command = [sys.executable, "-c", code]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process, contextlib.ExitStack() as opened:
        url = f"http://127.0.0.1:{port}/api/look/events"
        stream = opened.enter_context(opened_stream(url))
        assert next(stream.iter_lines()) == "event: marks"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert errors == ""
    assert process.returncode == 0


def test_a_view_needs_none_of_the_server_s_packages(tmp_path: Path) -> None:
    make_demo(tmp_path, runs=1, steps=1, rollouts=8)
    code = f"""
import sys
sys.modules.update(dict.fromkeys({SERVER_PACKAGES!r}))  # importing them fails
from pathlib import Path
from art_watch.view import make_view
assert make_view(Path({str(tmp_path)!r})).state.runs.folders()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_folder_without_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(str(tmp_path))):
        view(tmp_path, 0, opens_browser=False)
