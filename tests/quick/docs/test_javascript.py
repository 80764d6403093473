"""The app of docs/howto/javascript.md in Node.js, with a server that samples one text."""

import asyncio
import os
import shutil
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

import art
from art_server.settings import ApiKey
from tests.fakes.vllm import TEXT
from tests.pages import blocks
from tests.quick.server.served import serving

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed"),
]
KEYS = (
    ApiKey(key="trains"),
    ApiKey(key="app", scopes=frozenset({"infer", "feedback"}), projects=frozenset({"shop"})),
)


async def test_the_app_streams_asks_the_responses_api_and_scores_its_session(tmp_path: Path) -> None:
    (text,) = (text for text in blocks("javascript.md", "js") if text.startswith("// app.mjs"))
    (tmp_path / "app.mjs").write_text(text)
    async with serving(tmp_path / "server", api_keys=KEYS) as served:
        async with art.Backend(served.url, api_key="trains") as backend:
            await art.TrainableModel(name="helper", project="shop", base_model="art/tiny").register(backend)
        environment = {**os.environ, "ART_SERVER_URL": served.url, "ART_API_KEY": "app"}
        command = ("node", "app.mjs", "Where is order 52?")
        process = await asyncio.create_subprocess_exec(
            *command, cwd=tmp_path, env=environment, stdout=PIPE, stderr=PIPE
        )
        printed, errors = await process.communicate()
        assert printed.decode().splitlines() == [TEXT, TEXT, "scored"], errors.decode()
        assert [message["content"] for message in served.engine.vllm.responses[0]["input"]][1] == TEXT
