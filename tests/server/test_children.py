import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from art_server.children import Children

SPAWNS = "import subprocess, sys, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"


def session_members(leader: int) -> list[int]:
    members: list[int] = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
    return members


def test_what_a_killed_server_left_is_killed_with_all_that_it_spawned(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", SPAWNS], start_new_session=True)
    Children(tmp_path).add(child.pid)
    deadline = time.monotonic() + 10
    while len(session_members(child.pid)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child.kill()  # the leader is gone, what it spawned is not
    child.wait()
    assert session_members(child.pid)
    assert Children(tmp_path).reap() == [child.pid]
    while session_members(child.pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert Children(tmp_path).reap() == []


def test_a_process_id_that_another_program_took_is_left_alone(tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "60"], start_new_session=True)
    (tmp_path / "children.json").write_text(f'{{"{other.pid}": 1}}')
    Children(tmp_path).reap()
    assert other.poll() is None
    other.kill()
    other.wait()
