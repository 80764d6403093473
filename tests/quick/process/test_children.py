import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from art_server.process.children import Children
from tests.waiting import PATIENCE_SECONDS, wait_until

SPAWNS = "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"


def session_members(leader: int) -> list[int]:
    members: list[int] = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
    return members


def children(path: Path) -> Children:
    return Children(path, path / "logs")


def start(logs: Path, command: list[str]) -> "subprocess.Popen[bytes]":
    """A process that writes its errors into a server's logs, as our children do."""
    logs.mkdir(exist_ok=True)
    with open(logs / "engine.log", "ab") as log:
        return subprocess.Popen(command, start_new_session=True, stderr=log)


def test_what_a_killed_server_left_is_killed_with_all_that_it_spawned(tmp_path: Path) -> None:
    child = start(tmp_path / "logs", [sys.executable, "-c", SPAWNS])
    children(tmp_path).add(child.pid)
    wait_until(lambda: len(session_members(child.pid)) == 2)
    child.kill()  # the leader is gone, what it spawned is not
    child.wait()
    assert session_members(child.pid)
    assert children(tmp_path).reap() == [child.pid]
    wait_until(lambda: not session_members(child.pid))
    assert children(tmp_path).reap() == []


def test_a_process_id_that_another_program_took_is_left_alone(tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (tmp_path / "children.json").write_text(f'["{other.pid}"]')
    assert children(tmp_path).reap() == []
    assert other.poll() is None
    other.kill()
    other.wait()


def test_a_server_on_a_copied_folder_leaves_the_first_ones_children_alone(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    child = start(tmp_path / "one" / "logs", ["sleep", "600"])
    first = children(tmp_path / "one")
    first.add(child.pid)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert children(tmp_path / "two").reap() == []
    assert child.poll() is None
    first.remove(child.pid)
    assert child.wait(PATIENCE_SECONDS) == -signal.SIGKILL


def test_a_full_disk_does_not_keep_a_child_from_being_ended(tmp_path: Path) -> None:
    child = start(tmp_path / "logs", ["sleep", "600"])
    listed = Children(Path("/dev/full"), tmp_path / "logs")  # no folder: nothing can be written in it
    listed.add(child.pid)
    listed.remove(child.pid)
    assert child.wait(PATIENCE_SECONDS) == -signal.SIGKILL


def test_a_child_whose_id_another_program_got_is_not_killed(tmp_path: Path) -> None:
    """Neither when it is removed from the list, nor if its id is that of the session of this very server."""
    mine = children(tmp_path)
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    mine.add(other.pid)
    mine.remove(other.pid)
    assert other.poll() is None
    other.kill()
    other.wait()
    code = "import os, sys; from pathlib import Path; from art_server.process.children import Children; "
    code += "path = Path(sys.argv[1]); Children(path, path / 'logs').add(os.getsid(0)); "
    code += "assert Children(path, path / 'logs').reap() == []"
    server = start(tmp_path / "logs", [sys.executable, "-c", code, str(tmp_path)])
    assert server.wait(PATIENCE_SECONDS) == 0, (tmp_path / "logs" / "engine.log").read_text()


def test_the_end_of_a_child_is_the_end_of_all_that_it_spawned(tmp_path: Path) -> None:
    """Nobody has waited for the child, so it stays as a zombie, which holds no memory."""
    child = start(tmp_path / "logs", [sys.executable, "-c", SPAWNS])
    mine = children(tmp_path)
    mine.add(child.pid)
    wait_until(lambda: len(session_members(child.pid)) == 2)
    mine.end(child.pid)
    assert session_members(child.pid) == []
    child.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_a_child_whose_server_ended_while_it_started_ends(tmp_path: Path) -> None:
    """The kernel tells a child of its parent's end only after it has asked for that."""
    code = "from art_server.process.children import be_child; be_child(); print('lives')"
    for parent, lives in ((os.getpid(), True), (os.getppid(), False)):
        environment = {**os.environ, "ART_PARENT": str(parent)}
        ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert (ended.returncode, ended.stdout) == ((0, "lives\n") if lives else (-signal.SIGKILL, ""))
