"""All blocks of docs/learning-in-use.md run as they stand, except for the ids of answers. No other page has commands of scores."""

import asyncio
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import art
from tests import pages
from tests.pages import HOWTO, ROOT, blocks
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


async def test_the_python_of_the_page(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop, art.Backend(shop.served.url) as backend:
        model = art.TrainableModel(project="shop", name="helper", base_model="base")
        await model.register(backend)
        messages: Any = [{"role": "user", "content": "Where is order 52?"}]
        completion = await model.openai_client().chat.completions.create(model=NAME, messages=messages)
        names: dict[str, Any] = {"model": model, "completion": completion}
        for number in range(len(blocks(PAGE, "python"))):
            await pages.run(PAGE, number, names)
        assert (names["score"].state, names["score"].value) == ("scored", 1)


def test_no_block_is_left_out() -> None:
    languages = re.findall(r"^```(.*)$", (HOWTO / PAGE).read_text(), re.MULTILINE)
    assert {*languages[::2]} == {"bash", "python", "javascript", ""}, (
        "what a test above runs, and what `art status` prints"
    )
    texts = {file: file.read_text() for file in (ROOT / "README.md", ROOT / "SECURITY.md", *ROOT.glob("docs/**/*.md"))}
    commands = r"^ *(?:curl .*/(?:feedback|learning|answers|sessions)\b|art (?:learn|feedback) ).*"
    others = {file.name for file, text in texts.items() if re.search(commands, text, re.MULTILINE)}
    assert others == {"learning-in-use.md"}
