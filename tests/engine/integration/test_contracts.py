"""The real server and the real vLLM do what their fakes do (tests/contracts.py)."""

from pathlib import Path

import aiohttp
import pytest

from tests.contracts import check_server, check_vllm
from tests.live import Server, register

pytestmark = pytest.mark.anyio


async def test_the_server_keeps_the_contract(server: Server) -> None:
    await check_server(server.url)


async def test_vllm_keeps_the_contract(server: Server, tmp_path: Path) -> None:
    register(server, "vllm-contract")
    adapter = server.model_dir("vllm-contract") / "checkpoints" / "0000"
    run_dir = (server.path / "art" / ".server" / "run_dir").read_text().splitlines()[0]
    connector = aiohttp.UnixConnector(f"{run_dir}/engine.sock")
    async with aiohttp.ClientSession("http://vllm", connector=connector) as http:
        await check_vllm(http, adapter, tmp_path / "nothing")
