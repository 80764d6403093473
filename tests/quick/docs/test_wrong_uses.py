"""docs/wrong-uses.md has a row for each wrong use of tests/long/misuse, and within the promise."""

import re
from collections import Counter

from tests.long.misuse.page import PAGE, USES, cell
from tests.long.misuse.use import MAX_LINES

ROW = re.compile(r"^\| (.+?) \| (\d+) \| (.+) \|$", re.MULTILINE)


def test_the_page_has_each_use_once_and_few_lines() -> None:
    rows = [match.groups() for match in ROW.finditer(PAGE.read_text()) if match[1] != "wrong"]
    assert [name for name, _, _ in rows] == [cell(use.name) for use in USES]
    assert all(0 < int(num_lines) <= MAX_LINES for _, num_lines, _ in rows)


def test_no_two_uses_are_the_same() -> None:
    for what in (Counter(use.name for use in USES), Counter((use.wrong, use.cause) for use in USES)):
        assert what.most_common(1)[0][1] == 1, what.most_common(1)
    assert len(USES) >= 120


def test_the_remedy_is_followed() -> None:
    """The mended form is not the wrong form."""
    assert [use.name for use in USES if use.wrong == use.mended] == []
