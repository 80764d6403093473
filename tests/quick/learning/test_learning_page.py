"""The commands and the JavaScript of docs/learning-in-use.md run as they stand, except for the ids of answers."""

import asyncio
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.pages import blocks
from tests.quick.learning.crowd import NAME, Crowd, crowd

pytestmark = pytest.mark.anyio

PAGE = "../learning-in-use.md"
PLACEHOLDER = "chatcmpl-4bf92f3577b34da6a3ce929d0e0e4736"


async def run(shop: Crowd, *command: str) -> str:
    """What a program prints; it knows the server as the page does."""
    variables = {"ART": shop.served.url, "KEY": "any", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    process = await asyncio.create_subprocess_exec(
        *command, env=os.environ | variables, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_the_commands_of_the_page(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        body = {"model": NAME, "messages": [{"role": "user", "content": "Where is order 52?"}]}
        await shop.http.post("/s/chat-9/v1/chat/completions", json=body)
        answer = await shop.answer()
        scripts = [block.replace(PLACEHOLDER, answer) for block in blocks(PAGE, "bash")]
        printed = [
            await run(shop, "bash", "-e", "-c", f'curl() {{ command curl -sS "$@"; }}; {script}') for script in scripts
        ]
        output = "".join(printed)
        assert '"error"' not in output
        for expected in ('"state":"scored"', "learning is on", '"path":"/feedback/'):
            assert expected in output
        assert re.findall(r'"answers":(\d),"scores":(\d)', output) == [("1", "2"), ("1", "0"), ("0", "0")]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
async def test_the_javascript_of_the_page(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        answer = await shop.answer()
        token = await shop.http.post(f"/api/models/{NAME}/feedback/tokens", json={"answer": answer, "user": "u17"})
        known = {"completion": {"id": answer}, "path": token.json()["path"]}
        names = "".join(f"const {name} = {json.dumps(value)};" for name, value in known.items())
        for block in blocks(PAGE, "javascript"):
            await run(
                shop, "node", "--input-type=module", "-e", f"const {{ ART, KEY }} = process.env; {names}\n{block}"
            )
        assert [(score["state"], score.get("comment")) for score in await shop.scores()] == [
            *(("replaced", None), ("scored", "It found the order."))
        ]
