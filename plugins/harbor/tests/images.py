"""Images of Podman with this machine's own programs: no registry is asked."""

import shutil
import subprocess
from collections.abc import Collection
from pathlib import Path

import pytest


def write_root(root: Path, programs: Collection[str]) -> None:
    """The root folder of an image: programs with their libraries, and a user root."""
    for folder in ("bin", "tmp", "proc", "sys", "dev", "etc", "run", "root"):
        (root / folder).mkdir()
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (root / "etc" / "group").write_text("root:x:0:\n")
    for name in programs:
        program = Path("/usr/bin", name)
        shutil.copy(program, root / "bin" / name)
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for library in (word for word in listed.split() if word.startswith("/")):
            target = root / library.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, target)


def import_image(root: Path, name: str) -> None:
    """Makes an image of a root folder. Skips the test where Podman runs no containers."""
    archive = subprocess.run(["tar", "-C", root, "-c", "."], capture_output=True, check=True).stdout
    subprocess.run(["podman", "import", "-", name], input=archive, capture_output=True, check=True)
    ran = subprocess.run(
        ["podman", "run", "--rm", "--network", "none", name, "/bin/bash", "-c", ":"],
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        pytest.skip(f"podman runs no container here: {ran.stderr.strip()}")
