"""Models that get their first step without a job."""

from pathlib import Path

import httpx
import pytest

from art_server.jobs import trainer_process

LORA = {"rank": 4, "target_modules": ["q_proj", "layers.1.mlp.up_proj"]}


async def make_models(http: httpx.AsyncClient) -> None:
    """Registers a model of project q on art/tiny, uploads its step 0 as another model, and forks a third."""
    body = {"name": "registered", "project": "q", "base_model": "art/tiny", "lora": LORA}
    registered = await http.post("/api/models", json=body)
    assert registered.status_code == 200, registered.text
    tar = await http.get("/api/models/q/registered/checkpoints/0.tar")
    uploaded = await http.put("/api/models/q/uploaded/checkpoints/0.tar", content=tar.content)
    assert uploaded.status_code == 201, uploaded.text
    forked = await http.post("/api/models/q/registered/fork", json={"project": "q", "name": "forked"})
    assert forked.status_code in (200, 201), forked.text


def counted_starts(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The logs of all trainer's processes that are started from here on, in order."""
    starts: list[Path] = []
    start_child = trainer_process.start_child

    async def start(command: object, log: object, *settings: object) -> object:
        starts.append(log.path)  # type: ignore[attr-defined]
        return await start_child(command, log, *settings)  # type: ignore[arg-type]

    monkeypatch.setattr(trainer_process, "start_child", start)
    return starts
