"""A server that leaves sampling and training to other machines, before one has joined."""

from pathlib import Path

import httpx
import pytest

from art_server.server import build
from art_server.settings import ServerConfig
from tests.makers.registering import counted_starts, make_models
from tests.quick.machines.machines import KEYS, listening
from tests.waiting import PATIENCE_SECONDS

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("in_process")]


async def test_models_are_registered_and_imported_without_a_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = counted_starts(monkeypatch)
    server = build(ServerConfig(path=tmp_path, engines=0, ranks=0, api_keys=KEYS))
    key = {"authorization": "Bearer user"}
    async with (
        listening(server) as url,
        httpx.AsyncClient(base_url=url, headers=key, timeout=PATIENCE_SECONDS) as http,
    ):
        await make_models(http)
        assert {model.record.name for model in server.registry.all()} == {"registered", "uploaded", "forked"}
        assert starts == [] and server.trainer.pids == {}
