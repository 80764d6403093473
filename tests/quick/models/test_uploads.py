"""Checkpoints over HTTP: a step is downloaded and uploaded as one tar, and what is refused."""

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from starlette.requests import ClientDisconnect
from starlette.types import Message

from art_protocol.wire import LoRAConfig
from art_server.api.checkpoints import CHUNK_BYTES, TarResponse, download
from art_server.models import uploads as uploads_module
from art_server.store.archive import Description, describe_step, read_tar, write_tar
from art_server.store.model_folder import (
    ADAPTER_FILE,
    OPTIMIZER_FILE,
    ModelFolder,
    content_digests,
    copy_content,
)
from art_server.store.registry import Registry
from tests.quick.models.house import TINY_LORA, House, add_model, house
from tests.waiting import until

pytestmark = pytest.mark.anyio

URL = "/api/models/p/a/checkpoints/1.tar"
NEW = "/api/models/q/new/checkpoints/1.tar"


@pytest.fixture
def folder(tmp_path: Path, tiny_adapter: Path) -> ModelFolder:
    return add_model(tmp_path, tiny_adapter, steps=3)


def tar_of(folder: ModelFolder, kept: int = 1, **changes: Any) -> bytes:
    description = describe_step(folder, folder.read(), kept).model_copy(update=changes)
    return tar_bytes(folder.checkpoint_dir(kept), description)


def tar_bytes(content: Path, description: Description) -> bytes:
    buffer = io.BytesIO()
    write_tar(content, description, buffer)
    return buffer.getvalue()


def tar_of_adapter(content: Path, **changes: Any) -> bytes:
    """A checkpoint of step 1 that no server made."""
    description = Description(step=1, base_model="art/tiny", lora=TINY_LORA, files=content_digests(content))
    return tar_bytes(content, description.model_copy(update=changes))


# --- download -----------------------------------------------------------------------------------------------------


async def test_a_download_is_the_whole_checkpoint(tmp_path: Path, folder: ModelFolder) -> None:
    async with house(tmp_path) as here, here.client() as http:
        reply = await http.get(URL)
        assert reply.status_code == 200
        assert reply.headers["content-length"] == str(len(reply.content))
        assert reply.content == tar_of(folder)
        assert read_tar(io.BytesIO(reply.content), tmp_path / "x").step == 1
        assert sorted(entry.name for entry in folder.checkpoints_dir.iterdir()) == [
            *("0000", "0001", "0002"),
        ]


async def test_a_download_outlives_its_step(tmp_path: Path, folder: ModelFolder) -> None:
    async with house(tmp_path) as here:
        model, whole = here.registry.get("p", "a"), tar_of(folder)
        response = download(model, "1")
        folder.remove_steps([1])
        body = b""

        async def send(message: Message) -> None:
            nonlocal body
            body += message.get("body", b"")

        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        await response({"type": "http"}, receive, send)
        assert body == whole


async def test_a_step_that_is_not_there_is_not_downloaded(tmp_path: Path, folder: ModelFolder) -> None:
    async with house(tmp_path) as here, here.client() as http:
        here.registry.get("p", "a").deleting.add(1)
        for step, status in (("1", 404), ("9", 404), ("x", 422), ("²", 422), ("1" * 30, 422)):
            reply = await http.get(f"/api/models/p/a/checkpoints/{step}.tar")
            assert reply.status_code == status, step
        here.registry.get("p", "a").deleting.clear()
        assert (await http.get("/api/models/p/b/checkpoints/1.tar")).status_code == 404


# --- upload -------------------------------------------------------------------------------------------------------


async def test_an_upload_makes_the_model_at_its_step(tmp_path: Path, folder: ModelFolder) -> None:
    async with house(tmp_path) as here, here.client() as http:
        data = tar_of(folder)
        for _ in range(2):  # a repetition changes nothing
            reply = await http.put(NEW, content=data)
            assert reply.status_code == 201
            assert (reply.json()["name"], reply.json()["step"]) == ("new", 1)
        model = here.registry.resolve("new@1", "art/tiny", None).model
        assert model is not None and model.record.lora == TINY_LORA
        assert (model.folder.checkpoint_dir(1) / OPTIMIZER_FILE).exists()
        assert model.folder.read_checkpoint(1).job_id is None
        assert (await http.get(NEW)).content == data, "what came in goes out"
        assert not list((tmp_path / ".server" / "incoming").iterdir())
    assert Registry(tmp_path).get("q", "new").step == 1


async def test_an_upload_that_breaks_leaves_nothing(tmp_path: Path, folder: ModelFolder) -> None:
    data = tar_of(folder)

    async def broken() -> AsyncIterator[bytes]:
        yield data[:70_000]
        raise ClientDisconnect

    async with house(tmp_path) as here:
        with pytest.raises(ClientDisconnect):
            await here.uploads.receive("q", "new", 1, None, broken())
        assert not list((tmp_path / ".server" / "incoming").iterdir())
        assert [model.id for model in here.registry.all()] == ["p/a"]


async def test_an_upload_that_is_cancelled_at_its_start_closes_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[IO[Any]] = []

    def note(file: Path, mode: str) -> IO[Any]:
        opened.append(open(file, mode))  # noqa: SIM115
        return opened[-1]

    async def silent() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    monkeypatch.setattr(uploads_module, "open", note, raising=False)
    writing = asyncio.create_task(uploads_module.write_body(silent(), tmp_path / "incoming" / "one.tar"))
    await asyncio.sleep(0)
    writing.cancel()
    await asyncio.wait({writing})
    await until(lambda: opened)
    assert [file.closed for file in opened] == [True]


async def test_an_upload_waits_for_a_change_of_the_model(tmp_path: Path, folder: ModelFolder) -> None:
    """A rollback in between must not be undone by an older step that became the newest."""
    data = tar_of(folder)
    async with house(tmp_path) as here, here.client() as http:
        assert (await http.put(NEW, content=data)).status_code == 201
        lock = here.checkpoints._locks["q/new"]
        async with lock:
            again = asyncio.create_task(http.put(NEW, content=data))
            await until(lambda: lock._waiters)
            assert not again.done()
        assert (await again).status_code == 201


async def test_an_older_step_is_filled_in_and_nothing_else_is_changed(tmp_path: Path, folder: ModelFolder) -> None:
    async with house(tmp_path) as here, here.client() as http:
        data, newest = tar_of(folder), tar_of(folder, 2, step=3)
        folder.remove_steps([1])
        other = tar_of(folder, 0, step=1, created_at=1.0)
        assert (await http.put(URL, content=data)).status_code == 201
        assert folder.steps() == [0, 1, 2]
        assert here.engine.asked == ["forget"], "a request may have asked an earlier step 1"
        assert (await http.put(URL, content=other)).status_code == 201, "the same weights"
        reply = await http.put(URL.replace("/1.tar", "/3.tar"), content=newest)
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "step_beyond_newest")
        lora = LoRAConfig(rank=4, target_modules=["v_proj", "q_proj"])
        reply = await http.put(URL, content=tar_of(folder, lora=lora))
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "lora_differs")


async def test_a_model_whose_checkpoints_all_broke_comes_back_from_a_backup(
    tmp_path: Path, folder: ModelFolder
) -> None:
    data = tar_of(folder)
    for step in folder.steps():
        (folder.checkpoint_dir(step) / ADAPTER_FILE).write_bytes(b"rot")
    async with house(tmp_path) as here, here.client() as http:
        assert (await http.put(URL, content=data)).status_code == 201
        assert here.registry.resolve("p/a", "art/tiny", None).step == 1


async def test_a_step_with_other_content_is_not_replaced(
    tmp_path: Path, folder: ModelFolder, tiny_adapter: Path
) -> None:
    copy_content(tiny_adapter, tmp_path / "other")
    zeros = torch.zeros_like(load_file(tiny_adapter / ADAPTER_FILE)[A])
    change(tmp_path / "other", ADAPTER_FILE, **{A: zeros})
    async with house(tmp_path) as here, here.client() as http:
        reply = await http.put(URL, content=tar_of_adapter(tmp_path / "other"))
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "step_exists")


def change(content: Path, name: str, **tensors: torch.Tensor | None) -> None:
    file = content / name
    held: dict[str, Any] = load_file(file) | tensors
    save_file({key: tensor for key, tensor in held.items() if tensor is not None}, file)


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
LAYER_9 = A.replace("layers.0", "layers.9")
STEP = A.replace("lora_A", "lora_A.default") + ".step"


def wrong_shape(content: Path) -> None:
    change(content, ADAPTER_FILE, **{A: torch.zeros(4, 7)})


def no_such_layer(content: Path) -> None:
    pair = {LAYER_9: torch.zeros(4, 9), LAYER_9.replace("_A", "_B"): torch.zeros(9, 4)}
    change(content, ADAPTER_FILE, **pair)


def not_finite(content: Path) -> None:
    change(
        content,
        ADAPTER_FILE,
        **{A: torch.full_like(load_file(content / ADAPTER_FILE)[A], torch.nan)},
    )


def foreign_optimizer(content: Path) -> None:
    change(content, OPTIMIZER_FILE, other=torch.zeros(3))


def half_optimizer(content: Path) -> None:
    change(content, OPTIMIZER_FILE, **{STEP.replace(".step", ".exp_avg"): None})


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (wrong_shape, "[4, 7]"),
        (no_such_layer, ""),
        (not_finite, ""),
        (foreign_optimizer, "'other'"),
        (half_optimizer, "exp_avg"),
    ],
)
async def test_what_does_not_fit_the_base_is_refused(
    spoil: Any, named: str, tmp_path: Path, tiny_adapter: Path
) -> None:
    copy_content(tiny_adapter, tmp_path / "content")
    spoil(tmp_path / "content")
    async with house(tmp_path / "path") as here, here.client() as http:
        reply = await http.put(NEW, content=tar_of_adapter(tmp_path / "content"))
        assert reply.status_code == 422 and named in reply.json()["error"]["message"], reply.text
        assert here.registry.all() == []
        assert not list((tmp_path / "path" / ".server" / "incoming").iterdir())


async def refusal(here: House, data: bytes, url: str = NEW, **headers: str) -> tuple[int, str]:
    async with here.client(headers=headers) as http:
        reply = await http.put(url, content=data)
    return reply.status_code, reply.json()["error"]["code"]


async def test_uploads_that_are_not_taken_in(
    tmp_path: Path, folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tar_of(folder)
    async with house(tmp_path, max_lora_rank=8) as here:
        assert await refusal(here, b"no tar at all") == (422, "bad_tar")
        assert await refusal(here, b"") == (422, "bad_tar")
        assert await refusal(here, data[: len(data) // 2]) == (422, "bad_tar")
        assert await refusal(here, data, NEW.replace("1.tar", "2.tar")) == (422, "other_step")
        assert await refusal(here, data, NEW.replace("1.tar", "x.tar")) == (422, "bad_step")
        assert await refusal(here, data, NEW.replace("/new/", "/.new/")) == (422, "bad_name")
        assert await refusal(here, data, NEW + "?base_model=smollm3") == (422, "unknown_base_model")
        large = {"content-length": str(2**40)}
        assert await refusal(here, data, **large) == (413, "checkpoint_too_large")
        lora = LoRAConfig(rank=16)
        assert (await refusal(here, tar_of(folder, lora=lora)))[0] == 422
        monkeypatch.setattr(uploads_module, "MAX_CHECKPOINT_BYTES", 1000)
        assert await refusal(here, data) == (413, "checkpoint_too_large")
        assert [model.id for model in here.registry.all()] == ["p/a"]


async def test_a_rank_above_the_engine_s_is_refused(tmp_path: Path, folder: ModelFolder) -> None:
    async with house(tmp_path, max_lora_rank=1) as here:
        assert await refusal(here, tar_of(folder)) == (422, "rank_too_high")


async def test_a_download_that_breaks_off_closes_its_file() -> None:
    tar = io.BytesIO()
    tar.write(b"a" * 3 * CHUNK_BYTES)
    answer = TarResponse(tar)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message.get("body"):
            await asyncio.Event().wait()

    await answer({"type": "http"}, receive, send)
    assert tar.closed
