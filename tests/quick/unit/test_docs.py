"""Pages name files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")]
NAMED = re.compile(r"`((?:art_server|art_client|art_watch|plugins|scripts|tests|examples|docs|docker)/[\w./-]+)`")
SHORT = re.compile(r"`([a-z_]+/[a-z_]+\.py)`")
"""Of the server or the client."""
PACKAGES = (ROOT, ROOT / "art_server", ROOT / "art_client" / "art", *ROOT.glob("plugins/*/art"))
MADE = {
    "docs/learning/TASK.jsonl",
    "docs/learning/TASK.png",
    "docs/chaos.jsonl",
    "docker/api-keys.txt",
    "plugins/NAME/tests",
    "plugins/NAME/tests/long",
}
"""By a script, or by who reads the page."""
LINKED = re.compile(r"\]\((?!http|#)([^)#]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    named = {name for name in NAMED.findall(text) if not (ROOT / name).exists()}
    linked = {name for name in LINKED.findall(text) if not (page.parent / name).exists()}
    short = {name for name in SHORT.findall(text) if not any((package / name).exists() for package in PACKAGES)}
    assert not (named | short | linked) - MADE
