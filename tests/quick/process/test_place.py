"""This machine as a place: what a process gets, what is read of the process, and its end with all that it spawned."""

import asyncio
import json
import os
import socket
import sys
from pathlib import Path

import pytest

from art_protocol.log_file import LogFile
from art_server.process.children import Children
from art_server.process.place import Command, Here, ProcessHere
from art_server.shared.work_counters import WorkCounter, make_file
from tests.fakes.places import Prepared
from tests.processes import wait_until_gone
from tests.waiting import until

pytestmark = pytest.mark.anyio

ECHO = """
import os, subprocess, sys
child = subprocess.Popen(["sleep", "1000"])
print(child.pid, os.environ["CARD"], flush=True)
for line in sys.stdin:
    print("echo", line, end="", flush=True)
"""
BURN = "import time\nwhile True: time.process_time()"


async def start(folder: Path, code: str, **fields: object) -> ProcessHere:
    arguments = [sys.executable, "-c", code]
    command = Command(arguments=arguments, environment=os.environ | {"CARD": "0"}, **fields)  # type: ignore[arg-type]
    children = Children(folder, folder / "logs")
    here = Here(device="cpu", children=children, variables={"CARD": "3"})
    return await here.start(Prepared(command), LogFile(folder / "logs" / "log"))


async def test_a_process_gets_lines_and_its_devices_and_ends_with_what_it_spawned(tmp_path: Path) -> None:
    process = await start(tmp_path, ECHO, max_line_bytes=2**16)
    child, card = (await process.read_line()).split()
    assert card == b"3", "the place's variables come last"
    await process.send(b"a line\n")
    assert await process.read_line() == b"echo a line\n"
    assert process.returncode is None
    await process.end()
    assert (process.returncode, await process.read_line()) == (-9, b"")
    await process.send(b"nobody reads this\n")
    await process.end()
    await asyncio.to_thread(wait_until_gone, {int(child)})
    assert json.loads((tmp_path / "children.json").read_text()) == []


async def test_the_counters_of_an_engine_are_its_work_and_those_of_a_rank_its_cpu_time(tmp_path: Path) -> None:
    work_file = tmp_path / "work"
    make_file(work_file)
    engine = await start(tmp_path / "engine", BURN, work_file=work_file)
    rank = await start(tmp_path / "rank", BURN)
    before = engine.counters()
    assert before.cpu_seconds == 0.0 and engine.counters().work == before.work
    WorkCounter(work_file, 0).add(1)
    after = engine.counters()
    assert after.work != before.work and after.at > before.at
    await until(lambda: rank.counters().cpu_seconds > 0.0)
    assert rank.counters().work == b""
    for process in (engine, rank):
        await process.end()


async def test_files_stay_where_they_are(tmp_path: Path) -> None:
    here = Here(device="cpu")
    (tmp_path / "file").write_text("content")
    assert await here.deliver(tmp_path, ["file"]) == str(tmp_path)
    for end in (here.collect, here.forget):
        await end(tmp_path)
    await here.keep_only(())
    assert os.listdir(tmp_path) == ["file"]


async def test_a_free_port_can_be_opened() -> None:
    port = await Here(device="cpu").free_port()
    socket.create_server(("127.0.0.1", port)).close()
