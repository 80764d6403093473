"""Models that get their first step without a job."""

import httpx
import pytest

from art_server.jobs.trainer_process import RankProgram
from art_server.process.place import Command

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


def counted_starts(monkeypatch: pytest.MonkeyPatch) -> list[RankProgram]:
    """The trainer's programs that are started from here on, in order."""
    starts: list[RankProgram] = []
    prepare = RankProgram.prepare

    async def prepare_counted(program: RankProgram) -> Command:
        starts.append(program)
        return await prepare(program)

    monkeypatch.setattr(RankProgram, "prepare", prepare_counted)
    return starts
