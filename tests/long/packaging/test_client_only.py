"""An installation of the client alone: it imports, and the server says in one sentence what is missing."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
UV = shutil.which("uv") or str(ROOT / ".build" / "uv" / "bin" / "uv")


def test_the_client_installs_alone(tmp_path: Path) -> None:
    if not Path(UV).exists():
        pytest.skip("uv is not installed; scripts/setup installs it where it is missing")
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([UV, "venv", "-q", str(tmp_path / "venv")], check=True)
    subprocess.run([UV, "pip", "install", "-q", "--python", str(python), str(ROOT)], check=True)
    installed = subprocess.run(
        [UV, "pip", "list", "--python", str(python)], capture_output=True, text=True, check=True
    ).stdout
    assert not {"torch", "vllm", "fastapi", "transformers"} & set(installed.split())
    code = "import art; print(art.TrainableModel(name='a', project='p', base_model='art/tiny').name)"
    shown = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert shown.stdout == "a\n"
    for command in (["art-server"], ["art", "run", "--port", "0"]):
        server = subprocess.run(
            [python.with_name(command[0]), *command[1:]], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert server.returncode == 2 and server.stderr.count("\n") == 1
        assert "pip install '.[server]'" in server.stderr
