"""Environments of other packages than the tests' own."""

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def find_python(version: str) -> str | None:
    """An interpreter of that version that runs, pyenv's and uv's among them."""
    candidates = [f"python{version}"]
    if root := os.environ.get("PYENV_ROOT"):
        candidates += map(str, Path(root).glob(f"versions/{version}.*/bin/python"))
    known = uv("python", "find", "--no-python-downloads", version)
    candidates += known.stdout.split() if known.returncode == 0 else []
    for candidate in candidates:
        path = shutil.which(candidate)
        if path and not subprocess.run([path, "-V"], capture_output=True, check=False).returncode:
            return path
    return None


def uv(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs uv in the repository, with pip's find-links as its own."""
    command = [ROOT / "scripts" / "uv", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )


def has_find_links() -> bool:
    """Whether this machine names a folder or page of wheels: then torch's own index is not in reach."""
    return bool({"UV_FIND_LINKS", "PIP_FIND_LINKS"} & set(os.environ))
