"""The fakes of vLLM and of the engine do what the real ones do (tests/engine/integration/test_contracts.py, device/test_owner.py)."""

import inspect
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from art_server.engine.engine import Engine
from art_server.engine.fleet import Fleet
from tests.contracts import check_engine, check_vllm
from tests.fakes.parts import FakeEngine
from tests.fakes.vllm import FakeVllm

pytestmark = pytest.mark.anyio


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    return tmp_path / "adapter"


async def test_the_fake_vllm_keeps_the_contract(adapter: Path) -> None:
    vllm = FakeVllm()
    async with aiohttp.ClientSession(await vllm.listen()) as http:
        await check_vllm(http, adapter, adapter.parent / "nothing")
    await vllm.stop()


async def test_the_fake_engine_keeps_the_contract(adapter: Path) -> None:
    fake: Any = FakeEngine()
    fake.refused = {"p/b@0"}
    await check_engine(fake, adapter, "p/b@0", 1.0)


@pytest.mark.parametrize("real", [Engine, Fleet])
def test_the_fake_engine_takes_what_the_engine_takes(real: type) -> None:
    for name in vars(FakeEngine).keys() & vars(real).keys():
        ours, theirs = (inspect.getattr_static(kind, name) for kind in (FakeEngine, real))
        if inspect.isfunction(ours) and not name.startswith("_"):
            assert inspect.signature(ours).parameters == inspect.signature(theirs).parameters, name
