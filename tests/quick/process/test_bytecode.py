"""Where Python keeps the bytecode of the server and its children, in an environment that forbids bytecode and in others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT_RIGHTS = (
    "import ctypes; ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())"
)
"""Drops root's right to write into read-only folders (capset(2))."""
PROGRAM = f"""
import os, subprocess, sys
{WITHOUT_RIGHTS}
from art_server.process.bytecode import keep_bytecode
keep_bytecode()
print(sys.pycache_prefix, sys.dont_write_bytecode, flush=True)
subprocess.run([sys.executable, "-v", "-c", "import own_module, art_server.settings"], check=True)
"""
"""Starts a child, as the server starts engine and trainer. With -v Python names each file of bytecode that it writes or reads."""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder with the large packages of a server, which are empty here, and with a module."""
    for name in ("torch", "transformers", "vllm"):
        (tmp_path / "packages" / name).mkdir(parents=True)
        (tmp_path / "packages" / name / "__init__.py").write_text("")
    (tmp_path / "packages" / "own_module.py").write_text("VALUE = 1\n")
    return tmp_path / "packages"


def start(packages: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    path = os.pathsep.join(map(str, (packages, *filter(None, sys.path))))
    environment = {**kept, "HOME": str(packages.parent), "PYTHONPATH": path, **variables}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True, cwd=packages
    )


def test_a_child_keeps_bytecode_in_the_cache_where_the_environment_forbids_bytecode(packages: Path) -> None:
    cache = packages.parent / ".cache" / "art" / "bytecode"
    first = start(packages, PYTHONDONTWRITEBYTECODE="1")
    (compiled,) = cache.rglob("own_module*.pyc")
    (of_server,) = cache.rglob("art_server/settings*.pyc")
    assert first.stdout.split() == [str(cache), "False"]
    assert f"created {str(compiled)!r}" in first.stderr
    assert not list(packages.rglob("*.pyc"))
    second = start(packages, PYTHONDONTWRITEBYTECODE="1")
    for file in (compiled, of_server):
        assert f"{file} matches" in second.stderr
        assert f"created {str(file)!r}" not in second.stderr


def test_bytecode_that_lies_beside_the_sources_is_used(packages: Path) -> None:
    subprocess.run([sys.executable, "-m", "compileall", "-q", packages], env={}, check=True)
    started = start(packages, PYTHONDONTWRITEBYTECODE="1")
    assert started.stdout.split() == ["None", "True"]
    assert f"{packages}/__pycache__/own_module" in started.stderr
    assert not (packages.parent / ".cache").exists()


def test_a_folder_of_the_users_own_is_used(packages: Path) -> None:
    own = packages.parent / "own"
    started = start(packages, PYTHONDONTWRITEBYTECODE="1", PYTHONPYCACHEPREFIX=str(own))
    assert started.stdout.split() == [str(own), "False"]
    assert list(own.rglob("own_module*.pyc"))


def test_an_environment_that_forbids_nothing_stays_as_it_is(packages: Path) -> None:
    assert start(packages).stdout.split() == ["None", "False"]
    assert list(packages.rglob("own_module*.pyc"))


def test_read_only_packages_have_their_bytecode_in_the_cache(packages: Path) -> None:
    for folder in (*(path for path in packages.iterdir() if path.is_dir()), packages):
        folder.chmod(0o555)
    cache = packages.parent / ".cache" / "art" / "bytecode"
    assert start(packages).stdout.split() == [str(cache), "False"]
    assert list(cache.rglob("own_module*.pyc"))
