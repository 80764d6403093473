"""The names of TRL in docs/howto/from-others.md are those of the installed TRL."""

import re
from dataclasses import fields

from tests.pages import HOWTO


def test_trl_has_the_names() -> None:
    from trl import GRPOConfig  # here, because it takes seconds

    section = (HOWTO / "from-others.md").read_text().partition("## TRL")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    named = {name for cell in cells for name in re.findall(r"`([a-z_]+)[=`]", cell)} - {"grpo"}
    assert len(named) > 30
    assert named - {field.name for field in fields(GRPOConfig)} == set()
