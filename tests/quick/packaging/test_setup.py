import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
# Stands for `scripts/uv` and for the Python of `.venv`: an installation lasts until `du` has measured it twice, or ten seconds.
INSTALLS = """#!/bin/sh
n=0
while [ "$(wc -l < measured)" -lt 2 ] && [ $n -lt 100 ]; do n=$((n + 1)); /bin/sleep .1; done
"""
PROGRAMS = {
    "sleep": "exec /bin/sleep .05",
    "du": 'echo >> measured; printf "1M\t.venv\n"; exit 1',
    "gcc": "exit 1",
    "nvidia-smi": "exit 1",
}


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_setup_succeeds_when_du_fails(tmp_path):
    """`du` fails when a file vanishes while it looks, as pip's and Python's temporary files do."""
    for name in ("scripts/setup", "pyproject.toml", "constraints/server.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for folder in ("art_client", "plugins"):
        (tmp_path / folder / "kept").mkdir(parents=True)
    (tmp_path / "measured").touch()
    program(tmp_path / "scripts/uv", INSTALLS)
    program(tmp_path / ".venv/bin/python", "#!/bin/sh\necho .venv")
    for name, line in PROGRAMS.items():
        program(tmp_path / "bin" / name, f"#!/bin/sh\n{line}\n")
    environment = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "scripts/setup", "cpu"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "s, .venv has 1M\n" in done.stderr
    assert (tmp_path / ".venv/.setup-stamp").exists()
