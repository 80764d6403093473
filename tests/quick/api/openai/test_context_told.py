"""The server says what an agent's first prompt takes of the context, and which of its tools the model does not see."""

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


async def test_a_tool_that_is_left_out_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "art_server")
    own = {"type": "function", "name": "read", "parameters": {"type": "object"}}
    async with serving(tmp_path) as served, art.Backend(served.url) as backend:
        model = art.TrainableModel(name="m", project="p", base_model="art/tiny")
        await model.register(backend)
        async with httpx.AsyncClient() as http:
            for offer in ("web_search", "web_search", "web_search_preview", "image_generation"):
                body = {"model": "p/m", "input": "q", "tools": [own, {"type": offer}]}
                (await http.post(f"{served.url}/v1/responses", json=body)).raise_for_status()
    told = [record.getMessage() for record in caplog.records if "nothing here runs" in record.getMessage()]
    assert [line.partition(",")[0] for line in told] == [
        "p/m: its agent offers web_search",
        "p/m: its agent offers image_generation",
    ]
