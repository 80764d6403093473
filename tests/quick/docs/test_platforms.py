"""The client runs on Windows and macOS: here in processes without the modules and functions that either lacks, and with
the `sys.platform` of Windows. (`os.name` stays: with another one pathlib would make paths of Windows.)"""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.server import FakeArt

LOOKS_LIKE = """
import builtins, importlib, os, pkgutil, signal, sys
import asyncio, multiprocessing.connection, socket, subprocess, tempfile, filelock, httpx, matplotlib.font_manager, openai, pydantic, tqdm.auto
# These know other systems themselves.

modules, functions, signals = MISSING
real_import = builtins.__import__
def import_as_there(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {}).get("__name__", "")
    if name in modules and importer.split(".")[0] in ("art", "art_server", "__main__"):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return real_import(name, globals, locals, fromlist, level)
builtins.__import__ = import_as_there
for name in functions:
    delattr(os, name)
for name in signals:
    delattr(signal, name)
sys.platform = "win32"
"""


MISSING = (
    "crypt fcntl grp posix pty pwd resource syslog termios tty",
    "fork getpgid getsid killpg setsid sched_getaffinity sched_setaffinity sched_setscheduler O_CLOEXEC",
    "SIGALRM SIGHUP SIGKILL SIGUSR1 pthread_sigmask",
)
"""Modules, names of `os`, and names of `signal`."""


CLIENT = """
import art
for module in pkgutil.walk_packages(art.__path__, "art."):
    try:
        importlib.import_module(module.name)
    except ImportError as error:  # verifiers: an extra that no test environment with a server has
        assert error.name == "verifiers" or str(error).startswith("art.harbor runs on Linux only"), error

async def rollout(model):
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=[{"role": "user", "content": "a question"}]
    )
    return art.Trajectory(messages_and_choices=[completion.choices[0]], reward=1.0)

async def main():
    async with art.Backend() as backend:
        model = art.TrainableModel(name="agent", project="demo", base_model="art/tiny")
        await model.register(backend)
        groups = await art.gather_trajectory_groups([art.TrajectoryGroup([rollout(model)])])
        result = await model.train(groups)
        print(result.step)

asyncio.run(main())
"""


SERVER = """
from art_server import cli
cli.main(["--port", "PORT", "--path", "FOLDER"])
"""


def elsewhere(program: str) -> list[str]:
    missing = repr([names.split() for names in MISSING])
    return [sys.executable, "-c", LOOKS_LIKE.replace("MISSING", missing) + program]


@pytest.mark.anyio
async def test_the_client_trains_without_what_the_system_lacks(fake: FakeArt) -> None:
    process = await asyncio.create_subprocess_exec(
        *elsewhere(CLIENT),
        env=os.environ | {"ART_SERVER_URL": fake.url},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert output.decode() == "1\n", errors.decode()


def test_the_server_refuses_another_system_in_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:  # so that no server starts
        port = str(taken.getsockname()[1])
        program = SERVER.replace("PORT", port).replace("FOLDER", str(tmp_path / "art"))
        ran = subprocess.run(elsewhere(program), capture_output=True, text=True, check=False)
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1, ran.stderr
    assert "Linux" in ran.stderr and "art.Backend" in ran.stderr
