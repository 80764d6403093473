"""The table of docs/howto/coding-agents.md, from the rows of docs/coding-agents.jsonl."""

import json
import re
from collections.abc import Iterable
from typing import Any

from tests.long.coding_agents.agents import AGENTS, MAX_TOKENS, ROOT

ROWS = ROOT / "docs" / "coding-agents.jsonl"
PAGE = ROOT / "docs" / "howto" / "coding-agents.md"
TITLES = [
    *("agent", "version", "API", "requests of a rollout", "tools", "prompt, first to last"),
    *("context", "turns", "joined", "changed", "tokens in rows", "of these shared", "trained"),
]
TABLE = re.compile(r"^\| agent \| version \|.*?\n\n", re.MULTILINE | re.DOTALL)


def write_row(row: dict[str, Any]) -> None:
    """Replaces an agent's row in both files. The rows of other agents stay."""
    rows = {old["agent"]: old for old in map(json.loads, ROWS.read_text().splitlines())} | {row["agent"]: row}
    rows = {name: rows[name] for name in AGENTS if name in rows}
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    table = "".join(map(line, [TITLES, ["---"] * len(TITLES), *map(cells, rows.values())]))
    PAGE.write_text(TABLE.sub(lambda _: table + "\n", PAGE.read_text()))


def line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |\n"


def cells(row: dict[str, Any]) -> list[str]:
    requests = ", ".join(f"{count} {kind}" for kind, count in row["requests"].items())
    return [
        ", ".join(part.replace("-tools", " tools").replace("-mode", " mode") for part in row["agent"].split("-with-")),
        re.split(r"@(?=\d)|==", row["package"])[-1],
        row["api"],
        requests,
        str(row["tools"]),
        f"{row['first_prompt_tokens']:,} to {row['last_prompt_tokens']:,}",
        f"{row['last_prompt_tokens'] + MAX_TOKENS:,}",
        *(trained_cells(row) if "turns" in row else ["not run"] * 6),
    ]


def trained_cells(row: dict[str, Any]) -> list[str]:
    continuations = row["continuations"]
    return [
        str(sum(row["turns"].values())),
        str(continuations.get("joined", 0)),
        str(continuations.get("changed", 0)),
        f"{row['row_tokens']:,}",
        f"{row['shared_tokens']:,}",
        str(row["trained_tokens"]),
    ]
