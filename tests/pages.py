"""The how-to pages as programs: their blocks of code, and how a test runs them."""

import ast
import re
import shlex
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HOWTO = ROOT / "docs" / "howto"
SERVERS = ("http://127.0.0.1:7623", "http://gpu-box:7623")
"""The addresses in the pages."""

NOT_RUN = "# not run by a test"
"""The beginning of a block of bash whose programs are not installed here."""

PLACEHOLDERS = {"PROJECT/NAME": "demo/agent", "USER/agent": "user/agent"}
"""Words of the pages that the reader replaces."""


def blocks(page: str, language: str) -> list[str]:
    """The page's blocks of code in a language."""
    return re.findall(rf"```{language}\n(.*?)```", (HOWTO / page).read_text(), re.DOTALL)


async def run(page: str, number: int, names: dict[str, Any], url: str = "") -> None:
    """Runs a block of Python with the names of the blocks before it, against the server at `url`."""
    source = blocks(page, "python")[number]
    for address in SERVERS if url else ():
        source = source.replace(address, url)
    code = compile(source, f"{page}[{number}]", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result: Any = eval(code, names)
    if result is not None:
        await result


def commands(page: str, program: str) -> list[list[str]]:
    """The arguments of each call of a program in the page's blocks of bash, without blocks that no test runs."""
    lines = "".join(text for text in blocks(page, "bash") if not text.startswith(NOT_RUN)).splitlines()
    split_lines = [shlex.split(line, comments=True) for line in lines]
    for words in split_lines:
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            del words[0]
    calls = [words[1:] for words in split_lines if words and words[0] == program]
    return [[PLACEHOLDERS.get(word, word) for word in words] for words in calls]


PAGES = sorted(file.name for file in HOWTO.glob("*.md"))
