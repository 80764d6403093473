"""The README's program is that of the repository."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_readme_shows_the_example_that_is_there() -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown == (ROOT / "examples" / "minimal.py").read_text()
