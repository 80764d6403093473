"""`art finetune` and `art eval` as processes, beside a server in the test's own loop."""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from art_finetune.commands import add_commands

CODE = """
import sys
sys.argv[0] = "art"
from art_watch.terminal.cli import main
main()
"""


async def start(folder: Path, file: dict[str, Any], *arguments: str) -> asyncio.subprocess.Process:
    """`art finetune file.yml` with more arguments, in the folder."""
    (folder / "file.yml").write_text(json.dumps(file))
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CODE, "finetune", "file.yml", *arguments),
        cwd=folder,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )


async def end(process: asyncio.subprocess.Process) -> tuple[int, str]:
    """The exit code, and what was printed on stderr."""
    _, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, errors.decode()


def parsed(*arguments: str) -> argparse.Namespace:
    """The flags of a command line."""
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers(dest="command"))
    return parser.parse_args(arguments)
