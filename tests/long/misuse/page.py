"""docs/wrong-uses.md: a row for each use. `test_uses.py` writes the page from what it measures."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from tests.long.misuse import client_uses, command_uses, finetune_uses, http_uses
from tests.long.misuse.use import MAX_LINES, Ended, Use
from tests.pages import ROOT

PAGE, RECORD = (ROOT / "docs" / f"wrong-uses.{kind}" for kind in ("md", "jsonl"))
KINDS: Mapping[str, list[Use]] = {
    "Programs": client_uses.USES,
    "Requests": http_uses.USES,
    "Commands": command_uses.USES,
    "Finetuning": finetune_uses.USES,
}
USES = [use for uses in KINDS.values() for use in uses]
MAX_CHARACTERS = 320
"""Of a sentence in the table."""
HEAD = f"""# Wrong uses

What {{number}} mistakes print (`tests/long/misuse` makes them on a real server, and writes this page with `ART_TEST_PAGE=1`).
Each prints at most {MAX_LINES} lines, with the cause and what to do. The test also does what the sentence says: then it works.
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """What the wrong form of a use printed."""

    name: str
    num_lines: int
    said: str


def sentence(use: Use, ended: Ended) -> str:
    """The printed lines that have the cause and the remedy, as one text."""
    texts = [_message(line) for line in ended.lines]
    kept = [
        next((text for text in reversed(texts) if re.search(pattern, text)), "") for pattern in (use.cause, use.remedy)
    ]
    text = " ... ".join(dict.fromkeys(kept))
    if len(text) <= MAX_CHARACTERS:
        return text
    spans = [match.span() for pattern in (use.cause, use.remedy) if (match := re.search(pattern, text))]
    start, stop = min(span[0] for span in spans), max(span[1] for span in spans)
    start, stop = max(start - 40, 0) if start > 60 else 0, stop + 60
    if stop - start > 2 * MAX_CHARACTERS:
        first, last = spans[0], spans[-1]
        return f"{text[start : first[1] + 60]} ... {text[last[0] - 60 : stop]}"
    return ("... " if start else "") + text[start:stop] + (" ..." if stop < len(text) else "")


def _message(line: str) -> str:
    """A line, or the message of the error that it has as JSON."""
    if line.startswith('{"error"'):
        return str(json.loads(line)["error"]["message"])
    return line.strip()


def write_page(measured: Iterable[Measured]) -> None:
    """Writes the page, and its record. Uses that were not measured keep the row of the record."""
    by_name = (
        {row["name"]: Measured(**row) for row in map(json.loads, RECORD.read_text().splitlines())}
        if RECORD.exists()
        else {}
    )
    by_name |= {row.name: row for row in measured}
    rows = [by_name[use.name] for use in USES if use.name in by_name]
    RECORD.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    PAGE.write_text(render(rows))


def render(measured: Iterable[Measured]) -> str:
    """The page."""
    by_name = {row.name: row for row in measured}
    text = HEAD.format(number=len(by_name))
    for kind, uses in KINDS.items():
        text += f"\n## {kind}\n\n| wrong | lines | what is said |\n|---|---|---|\n"
        for row in (by_name[use.name] for use in uses if use.name in by_name):
            text += f"| {cell(row.name)} | {row.num_lines} | {cell(row.said)} |\n"
    return text


def cell(text: str) -> str:
    """The text in a cell of a Markdown table."""
    for written, shown in (("|", "\\|"), ("<", "&lt;"), ("*", "\\*"), ("](", "]\\(")):
        text = text.replace(written, shown)
    return text
