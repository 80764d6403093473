"""The documentation as a site."""

import subprocess
from pathlib import Path

import art

ROOT = Path(__file__).parents[3]


def test_the_site_has_every_page_and_every_public_name(tmp_path: Path) -> None:
    command = [ROOT / ".venv" / "bin" / "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in (ROOT / "docs").glob("*.md"):
        assert (tmp_path / page.stem / "index.html").exists(), page.name
    reference = (tmp_path / "api" / "index.html").read_text()
    missing = [name for name in art.__all__ if f'id="art.{name}"' not in reference]
    assert not missing
