"""The header `x-art-step`: what the name of a model without a step means."""

from pathlib import Path
from typing import Any

import httpx
import pytest

import art
from art_protocol.wire import SEED_HEADER, STEP_HEADER
from tests.quick.server.served import sample_group, serving

pytestmark = pytest.mark.anyio


async def test_a_name_without_a_step_means_the_headers(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, art.Backend(served.url) as backend:
        model = art.TrainableModel(name="a", project="p", base_model="art/tiny")
        await model.register(backend)
        await model.train([await sample_group(model)])
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "q"}]}

        async def ask(name: str, step: str) -> httpx.Response:
            async with httpx.AsyncClient(base_url=served.url) as http:
                headers = {STEP_HEADER: step}
                return await http.post("/v1/chat/completions", json=body | {"model": name}, headers=headers)

        def sampler(response: httpx.Response) -> tuple[str, int | None]:
            assert response.status_code == 200, response.text
            mark = response.json()["choices"][0].get("art") or {}
            return response.json()["model"], mark.get("step")

        assert sampler(await ask("p/a", "0")) == ("p/a", 0)
        assert sampler(await ask("a", "1")) == ("a", 1)
        for named in ("p/a@1", "p/a:step1"):
            assert sampler(await ask(named, "0")) == (named, 1), "a name with a step means that step"
        assert sampler(await ask("p/a", "base"))[1] is None
        assert sampler(await ask("base", "0"))[1] is None
        for wrong in ("7", "x"):
            refused = await ask("p/a", wrong)
            assert refused.status_code == 404 and refused.json()["error"]["param"] == "model"


@pytest.mark.parametrize("seed", ["x", "-1", "9" * 30])
async def test_a_seed_in_the_header_is_a_number(tmp_path: Path, seed: str) -> None:
    async with serving(tmp_path) as served, httpx.AsyncClient(base_url=served.url) as http:
        body = {"model": "base", "messages": [{"role": "user", "content": "q"}]}
        refused = await http.post("/v1/chat/completions", json=body, headers={SEED_HEADER: seed})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "seed"
