"""What tests in boxes share: the tasks, whether bubblewrap works here, and what is left of boxes."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from art.harbor import boxes

TASKS = Path(__file__).with_name("tasks")


def why_no_bubblewrap() -> str | None:
    """Why boxes cannot be tried on this machine; None if they can."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed (the program bwrap)"
    ran = subprocess.run(
        ["bwrap", "--unshare-pid", "--unshare-net", "--ro-bind", "/", "/", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"bubblewrap does not work here: {ran.stderr.strip()}" if ran.returncode else None


REASON = why_no_bubblewrap()
needs_bubblewrap = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def write_task(folder: Path, test: str, *, toml: str = "", instruction: str = "Do something.") -> Path:
    """A task's folder with these tests."""
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text(f'version = "1.0"\n{toml}')
    (folder / "instruction.md").write_text(instruction)
    (folder / "tests" / "test.sh").write_text(test)
    return folder


def left() -> list[str]:
    """What is left of boxes on this machine: folders, mounts, cgroups and processes."""
    state = boxes.state_folder()
    things = [str(path) for path in state.glob("*") if path.name != "lock"]
    things += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(state) in line]
    prefix = boxes.cgroup_name(state / "0").removesuffix("0")
    for root, folders, _ in os.walk(boxes.CGROUPS):
        things += [f"{root}/{name}" for name in folders if name.startswith(prefix)]
    return things + processes_of_boxes()


def processes_of_boxes() -> list[str]:
    """The command lines of this user's holders and of the processes in their boxes: the folder is in the command line, or, as root, the
    box's user has the process."""
    state = boxes.state_folder()
    users = range(boxes.first_user(state), boxes.first_user(state) + boxes.USERS_OF_RANGE)
    lines: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            is_box = str(state) in line or process.stat().st_uid in users
            condition = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if is_box and condition != "Z":
            lines.append(f"{process.name}: {line}")
    return lines


def holders() -> list[int]:
    """The processes that hold this user's boxes."""
    return [json.loads(file.read_text())["pid"] for file in boxes.state_folder().glob("*/holder")]
