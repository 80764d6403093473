"""The same faults with boxes of a user who is not root, in user namespaces."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from plugins.harbor.tests.boxed import needs_bubblewrap
from plugins.harbor.tests.faults import FAULTS

ROOT = Path(__file__).parents[3]
SYSTEM_PYTHON = f"/usr/bin/python3.{sys.version_info.minor}"
USER = 65_500
PROGRAM = """
import asyncio, json, sys, traceback
from pathlib import Path
from plugins.harbor.tests.boxed import left
from plugins.harbor.tests.faults import FAULTS, end_of

async def main():
    free = asyncio.Semaphore(4)
    async def one(number, fault):
        async with free:
            end = await end_of(fault, Path(sys.argv[1], str(number)))
        return end if isinstance(end, float) else end.__name__
    ends = await asyncio.gather(*(one(number, fault) for number, fault in enumerate(FAULTS.values())))
    print(json.dumps({"ends": ends, "left": left()}))

asyncio.run(main())
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of the user. Those of pytest are root's."""
    path = Path(tempfile.mkdtemp(prefix="art-harbor-"))
    os.chown(path, USER, USER)
    yield path
    shutil.rmtree(path)


@needs_bubblewrap
@pytest.mark.skipif(os.getuid() != 0, reason="the other tests have boxes of this user")
def test_another_users_boxes_end_the_same_way(folder: Path) -> None:
    command = [
        "setpriv",
        f"--reuid={USER}",
        f"--regid={USER}",
        "--clear-groups",
        SYSTEM_PYTHON,
        "-c",
        PROGRAM,
        str(folder),
    ]
    site_packages = next(path for path in sys.path if path.endswith("site-packages"))
    paths = [str(path) for path in (ROOT / "art_client", ROOT / "plugins" / "harbor", ROOT, site_packages)]
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "PYTHONPATH": ":".join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if (
        not Path(SYSTEM_PYTHON).exists()
        or subprocess.run([*command[:5], "-c", "import pydantic"], env=environment, check=False).returncode
    ):
        pytest.skip(f"another user cannot run {SYSTEM_PYTHON} with the packages of this environment")
    ran = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    expected = [fault.ends.__name__ if isinstance(fault.ends, type) else fault.ends for fault in FAULTS.values()]
    ends = dict(zip(FAULTS, result["ends"], strict=True))
    assert ends == dict(zip(FAULTS, expected, strict=True))
    assert result["left"] == []
