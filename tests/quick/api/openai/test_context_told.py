"""The server says what an agent's first prompt takes of the context."""

import logging
from pathlib import Path

import httpx
import pytest

import art
from tests.fakes.vllm import PROMPT
from tests.quick.server.served import serving

pytestmark = pytest.mark.anyio


async def test_the_first_prompt_of_an_agent_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "art_server")
    async with serving(tmp_path) as served, art.Backend(served.url) as backend:
        model = art.TrainableModel(name="m", project="p", base_model="art/tiny")
        await model.register(backend)
        async with httpx.AsyncClient() as http:
            for session in ("", "/s/one", "/s/two"):
                body = {"model": "p/m", "messages": [{"role": "user", "content": f"question {session}"}]}
                (await http.post(f"{served.url}{session}/v1/chat/completions", json=body)).raise_for_status()
    told = [record.getMessage() for record in caplog.records if "the first prompt of its agent" in record.getMessage()]
    assert len(told) == 1, "not of a request without a session, and not again"
    assert told[0].startswith(f"p/m: the first prompt of its agent has {len(PROMPT)} tokens, and the context has ")
    assert any(
        "registered p/m on base, with a context of 4096 tokens" in record.getMessage() for record in caplog.records
    )
