"""What a server finds at a model's first use: whole checkpoints serve, broken ones are set aside."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from art_protocol.history import history_row
from art_protocol.wire import JobReport, LoRAConfig, RegisterRequest
from art_server.errors import NotFound, StorageFull
from art_server.store import files
from art_server.store.adapter_tensors import check_checkpoint
from art_server.store.base_models import TINY_DIR, BaseModel
from art_server.store.model_folder import ADAPTER_FILE, CONFIG_FILE, OPTIMIZER_FILE, ModelFolder
from art_server.store.registry import Registry
from art_watch.runs import Runs
from tests.quick.models.house import House, add_model, commit, house

pytestmark = pytest.mark.anyio


def spoil(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def describe(folder: ModelFolder, step: int, text: str) -> None:
    (folder.checkpoint_dir(step) / "checkpoint.json").write_text(text)


def test_a_commit_writes_the_digest_of_each_file(tmp_path: Path, tiny_adapter: Path) -> None:
    folder = add_model(tmp_path, tiny_adapter)
    record = folder.read_checkpoint(0)
    assert set(record.files) == {CONFIG_FILE, ADAPTER_FILE, OPTIMIZER_FILE}
    assert record.files[ADAPTER_FILE] == files.file_digest(tiny_adapter / ADAPTER_FILE)
    assert folder.fault(0) is None


BREAK = {
    "one bit of the adapter": lambda folder: spoil(folder.checkpoint_dir(2) / ADAPTER_FILE),
    "one bit of the optimizer's state": lambda folder: spoil(folder.checkpoint_dir(2) / OPTIMIZER_FILE),
    "the configuration is missing": lambda folder: (folder.checkpoint_dir(2) / CONFIG_FILE).unlink(),
    "no description": lambda folder: (folder.checkpoint_dir(2) / "checkpoint.json").unlink(),
    "half a description": lambda folder: describe(folder, 2, '{"step": 2, "fil'),
    "the description of another step": lambda folder: describe(folder, 2, '{"step": 1}'),
    "a path in the description": lambda folder: describe(
        folder, 2, json.dumps({"step": 2, "files": {"../../model.json": "0"}})
    ),
}


async def first_use(root: Path) -> int:
    """The step that serves when a new server has used the model."""
    registry = Registry(root)
    model = registry.get("p", "a")
    await asyncio.gather(*(registry.verify(model) for _ in range(3)))
    return model.step


@pytest.mark.parametrize("how", BREAK)
async def test_a_broken_checkpoint_is_set_aside_and_the_one_before_serves(
    how: str, tmp_path: Path, tiny_adapter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = add_model(tmp_path, tiny_adapter, steps=3)
    BREAK[how](folder)
    left = sorted(entry.name for entry in folder.checkpoint_dir(2).iterdir())
    assert Registry(tmp_path).get("p", "a").step == 2, "a start reads no weights"
    assert (await first_use(tmp_path), folder.steps()) == (1, [0, 1])
    (aside,) = folder.checkpoints_dir.glob(".broken-0002-*")
    assert sorted(entry.name for entry in aside.iterdir()) == left, "nothing is deleted"
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "p/a@2 IS BROKEN" in line and str(aside) in line
    assert await first_use(tmp_path) == 1


async def test_all_broken_checkpoints_are_set_aside_until_one_is_whole(
    tmp_path: Path, tiny_adapter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = add_model(tmp_path, tiny_adapter, steps=3)
    for step in folder.steps():
        spoil(folder.checkpoint_dir(step) / ADAPTER_FILE)
    registry = Registry(tmp_path)
    with pytest.raises(NotFound, match="p/a' has no whole checkpoint"):
        await registry.verify(registry.get("p", "a"))
    assert registry.find("p", "a") is None
    assert len(list(folder.checkpoints_dir.glob(".broken-*"))) == 3
    assert "p/a HAS NO WHOLE CHECKPOINT" in caplog.text


async def test_what_was_never_described_or_dropped_on_purpose_is_no_fault(tmp_path: Path, tiny_adapter: Path) -> None:
    folder = add_model(tmp_path, tiny_adapter, steps=2)
    (folder.checkpoint_dir(1) / OPTIMIZER_FILE).unlink()
    assert await first_use(tmp_path) == 1
    describe(folder, 1, '{"step": 1, "job_id": "an older server wrote no digests"}')
    spoil(folder.checkpoint_dir(1) / ADAPTER_FILE)
    assert await first_use(tmp_path) == 1


def test_what_a_killed_server_was_deleting_is_deleted_at_the_next_start(tmp_path: Path, tiny_adapter: Path) -> None:
    folder = add_model(tmp_path, tiny_adapter, steps=2)
    files.bury_folder(folder.checkpoint_dir(0))
    add_model(tmp_path, tiny_adapter, name="b").move_to_trash()
    (tmp_path / "p" / "models" / ".made.tmp").mkdir()
    registry = Registry(tmp_path)
    assert [model.id for model in registry.all()] == ["p/a"]
    assert [entry.name for entry in (tmp_path / "p" / "models").iterdir()] == ["a"]
    assert [entry.name for entry in folder.checkpoints_dir.iterdir()] == ["0001"]


async def test_a_step_that_is_made_again_has_none_of_the_lost_one_s_metrics(tmp_path: Path, tiny_adapter: Path) -> None:
    folder = add_model(tmp_path, tiny_adapter, steps=3)
    folder.append_history(history_row(2, {"val/reward": 0.9}, "then"))
    spoil(folder.checkpoint_dir(2) / ADAPTER_FILE)
    forgotten: list[tuple[int, int]] = []
    registry = Registry(tmp_path, lambda *arguments: forgotten.append(arguments))
    model = registry.get("p", "a")
    await registry.verify(model)
    assert forgotten == [(model.number, 1)]
    model.history.add(1, {"val/reward": 0.5})
    commit(folder, tiny_adapter, 2)
    for _ in range(2):  # the second is that of a server that was killed
        model.history.add(2, {"train/reward": 0.3}, "another job")
    imported = Runs(tmp_path).history(folder)
    for history in (model.history, imported):
        assert history.values([2]) == {2: {"train/reward": 0.3}}
    assert model.best_step() == imported.best_step() == 1
    model.history.add(2, {"val/reward": 0.6})
    assert model.history.values([2])[2]["val/reward"] == 0.6 and model.best_step() == 2


async def test_the_key_of_a_job_whose_step_was_set_aside_names_a_new_job(tmp_path: Path, tiny_adapter: Path) -> None:
    folder = add_model(tmp_path, tiny_adapter, steps=3)
    async with house(tmp_path) as here:
        for step in (1, 2):
            job = here.add_job(key=f"key-{step}")
            here.queue.set_running(job, step)
            here.queue.set_done(job, {}, JobReport())
    spoil(folder.checkpoint_dir(2) / ADAPTER_FILE)
    async with house(tmp_path) as here:
        model = await here.registry.get_whole("p", "a")
        kept = here.queue.find_key(model.number, "key-1", "digest")
        assert kept is not None and kept.target_step == 1
        assert here.queue.find_key(model.number, "key-2", "digest") is None, "it would answer: done, step 2"


async def test_a_server_that_dies_while_it_sets_a_step_aside_forgets_it_nevertheless(
    tmp_path: Path, tiny_adapter: Path
) -> None:
    folder = add_model(tmp_path, tiny_adapter, steps=3)
    spoil(folder.checkpoint_dir(2) / ADAPTER_FILE)
    steps_when_told: list[list[int]] = []
    registry = Registry(tmp_path, lambda *_: steps_when_told.append(folder.steps()))
    await registry.verify(registry.get("p", "a"))
    assert steps_when_told == [[0, 1, 2]] and folder.steps() == [0, 1]


async def test_every_use_of_a_model_verifies_it(tmp_path: Path, tiny_adapter: Path) -> None:
    """Its routes, a registration, an upload, ART's wire, a request for its answers."""
    folder = add_model(tmp_path / "whole", tiny_adapter, steps=2)
    async with house(tmp_path / "whole") as here, here.client() as client:
        tar = (await client.get("/api/models/p/a/checkpoints/1.tar")).content
    shape = {"rank": 4, "target_modules": ["q_proj", "v_proj"]}
    model = {"name": "a", "project": "p", "base_model": "art/tiny"}
    uses: dict[str, tuple[str, str, dict[str, Any]]] = {
        "route": ("GET", "/api/models/p/a", {}),
        "registration": ("POST", "/api/models", {"json": {**model, "lora": shape}}),
        "upload": ("PUT", "/api/models/p/a/checkpoints/1.tar", {"content": tar}),
        "wire": ("POST", "/_get_step", {"json": model}),
        "answer": ("POST", "/v1/chat/completions", {"json": {"model": "p/a", "messages": [{"role": "user"}]}}),
    }
    assert folder.newest_step() == 1
    for use, (method, path, options) in uses.items():
        model_folder = add_model(tmp_path / use, tiny_adapter, steps=3)
        spoil(model_folder.checkpoint_dir(2) / ADAPTER_FILE)
        async with house(tmp_path / use) as here, here.client() as client:
            assert here.registry.get("p", "a").step == 2
            await client.request(method, path, **options)
            assert here.registry.get("p", "a").step == 1, use


async def test_a_registration_that_was_cut_off_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step 0 may have another adapter shape."""

    async def register(here: House, rank: int) -> None:
        shape = LoRAConfig(rank=rank)
        request = RegisterRequest(project="p", name="a", base_model="art/tiny", lora=shape)
        await here.server.registration.register(request, {})

    def fill(*_: object) -> None:
        raise OSError(28, "No space left on device")

    async with house(tmp_path) as here:
        monkeypatch.setattr(here.server.registration._base, "load", _tiny)
        with monkeypatch.context() as patch:
            patch.setattr(ModelFolder, "create", fill)
            with pytest.raises(StorageFull):
                await register(here, rank=16)
        await register(here, rank=4)
        folder = here.registry.get("p", "a").folder
        check_checkpoint((await _tiny()).facts.layers, LoRAConfig(rank=4), folder.checkpoint_dir(0))


async def _tiny(*_: object) -> BaseModel:
    return BaseModel("art/tiny", TINY_DIR)
