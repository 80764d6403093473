"""Which base model engine and trainer load, and what a start that fails leaves."""

import asyncio
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from art_server.engine.device.detection import Gpu, Machine
from art_server.engine.device.plan import Card
from art_server.errors import Conflict, InvalidInput
from art_server.models import base_loader
from art_server.process import conversion
from art_server.settings import ApiKey
from art_server.store.base_models import SMALL_FILES, TINY_DIR, BaseModel, NotConverted
from tests.fakes.clock import FakeClock
from tests.makers.first_steps import write_first_checkpoint
from tests.quick.models.house import TINY_LORA, House, add_model, house
from tests.refusals import refused
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("in_process")]


class Loading:
    """Engine and trainer as the loader sees them."""

    def __init__(self, here: House):
        self.loader = here.server.base
        self.engine = here.engine
        self.engine.base, self.engine.state = None, "none"
        self.plans: list[Any] = []
        self.loader._trainer = self  # type: ignore[assignment]
        self.trained: Path | None = None
        """The base model of the trainer's process; None while there is none."""

    def set_base(self, path: Path, plan: object) -> None:
        self.plans.append(plan)
        self._next = path

    async def run(self, _: object) -> Any:
        """A process that runs keeps its base model."""
        self.trained = self.trained or self._next
        await asyncio.Event().wait()

    async def stop(self) -> None:
        self.trained = None


async def test_the_trainer_of_a_base_model_whose_engine_failed_does_not_train_the_next(
    tmp_path: Path,
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in TINY_DIR.iterdir():
        if file.is_file():
            (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"note": "other weights"}))
    async with house(tmp_path / "art") as here:
        loading = Loading(here)
        await loading.loader.load("art/tiny")
        await until(lambda: loading.trained == TINY_DIR)
        here.engine.state = "failed"
        await loading.loader.load(str(other))
        await until(lambda: loading.trained == other)
        here.engine.state = "failed"
        await loading.loader.load(str(other))  # the same again: a step that runs goes on
        assert loading.trained == other
        await loading.loader.stop()


async def test_two_fine_tunes_of_one_configuration_are_two_base_models(tmp_path: Path) -> None:
    """They differ in no name, size or setting, only in the numbers."""
    one, other, link = (tmp_path / name for name in ("one", "other", "link"))
    shutil.copytree(TINY_DIR, one)
    shutil.copytree(TINY_DIR, other)
    weights = (other / "model.safetensors").read_bytes()
    (other / "model.safetensors").write_bytes(weights[:-64] + bytes(64))
    link.symlink_to(one)
    async with house(tmp_path / "art") as here:
        loading = Loading(here)
        loaded = await loading.loader.load(str(one))
        assert await loading.loader.load(str(link)) is loaded
        with refused(Conflict, "base_model_differs", "base_model") as raised:
            await loading.loader.load(str(other))
        assert f"register with base_model='{one}'" in str(raised.value)
        with pytest.raises(InvalidInput) as unknown:
            await loading.loader.load(str(tmp_path / "none"))
        assert f"This server has '{one}' loaded" in unknown.value.message
        await loading.loader.stop()


@pytest.mark.parametrize("content", ["{", '{"base_model": "no/such"}', '{"base_model": "./none"}'])
async def test_a_base_model_that_cannot_be_restored_stops_no_server(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    async with house(tmp_path) as here:
        loading = Loading(here)
        loading.loader._file.parent.mkdir(parents=True, exist_ok=True)
        loading.loader._file.write_text(content)
        await loading.loader.start()
        await until(lambda: loading.loader._fetching is not None and loading.loader._fetching.done())
        assert loading.loader.fatal is None and here.engine.base is None
        await loading.loader.load("art/tiny")
        assert here.engine.base is not None
        await loading.loader.stop()


async def test_a_base_that_cannot_be_trained_is_refused_before_its_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def download(name: str, *, allow_patterns: list[str], **_: object) -> str:
        asked.append(allow_patterns)
        config = json.loads((TINY_DIR / "config.json").read_text())
        quantized = config | {"quantization_config": {"quant_method": "fp8"}}
        (tmp_path / "config.json").write_text(json.dumps(quantized))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    async with house(tmp_path / "server") as here:
        with refused(InvalidInput, "not_trainable", "base_model"):
            await Loading(here).loader.load("some/model-FP8")
        assert asked == [SMALL_FILES] and here.engine.base is None


async def test_requests_wait_while_the_base_model_is_being_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart a download can take minutes. Nothing is refused for good because of it."""
    may_end = threading.Event()

    def find(*_: object, **__: object) -> BaseModel:
        may_end.wait(PATIENCE_SECONDS)
        return BaseModel("art/tiny", TINY_DIR)

    monkeypatch.setattr(base_loader, "find_base_model", find)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    write_first_checkpoint(str(TINY_DIR), TINY_LORA, 0, adapter)
    add_model(tmp_path, adapter)
    clock = FakeClock()
    async with house(tmp_path, clock=clock) as here, here.client() as http:
        here.add_job(key="known")
        loading = Loading(here)
        loading.loader._file.write_text('{"base_model": "art/tiny"}')
        await loading.loader.start()
        train: Any = {"headers": {"idempotency-key": "known"}, "json": {"groups": []}}
        refused_ones: list[tuple[str, dict[str, Any]]] = [
            ("/api/models/p/a/train", train),
            ("/v1/chat/completions", {"json": {"model": "art/tiny", "messages": []}}),
        ]
        for path, options in refused_ones:
            asking = asyncio.create_task(http.post(path, **options))
            await clock.end(here.server.config.wait_limit_seconds)
            refused = (await asking).json()["error"]
            assert (refused["code"], refused["retryable"]) == ("engine_not_ready", True), refused
        asked = asyncio.create_task(http.post("/api/models/p/a/train", **train))
        await asyncio.sleep(0)
        may_end.set()
        answer = (await asked).json()["error"]
        assert answer["code"] == "key_reused"  # the queue was asked; this body is another
        await loading.loader.stop()


CONVERTING = "base model smollm2: converting, once: part 2 of 4, reads the weights"


@pytest.fixture
def converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a base model that a conversion has yet to make (`tests/fakes/conversion.py`)."""
    folder = tmp_path / "cache" / "smollm2"
    folder.parent.mkdir()

    def find(name: str, *_: object, **__: object) -> BaseModel:
        if not folder.exists():
            raise NotConverted(name, folder)
        return BaseModel(name, folder)

    monkeypatch.setattr(base_loader, "find_base_model", find)
    monkeypatch.setattr(conversion, "PROGRAM", "tests.fakes.conversion")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    return folder


async def test_a_conversion_is_shown_and_blocks_nothing(tmp_path: Path, converted: Path) -> None:
    async with house(tmp_path / "art") as here, here.client() as http:
        loading = Loading(here)
        load = asyncio.create_task(loading.loader.load("smollm2"))
        await until(lambda: loading.loader.fetch_progress == CONVERTING)
        health = (await http.get("/health")).json()
        assert (health["engine"], health["detail"], health["waits_for"]) == ("starting", CONVERTING, CONVERTING)
        assert health["progress"][-1]["text"] == CONVERTING
        converted.with_name("ends").touch()
        assert (await load).path == converted
        assert loading.loader.fetch_progress is None
        await loading.loader.stop()


async def test_a_server_that_stops_ends_the_conversion(tmp_path: Path, converted: Path) -> None:
    async with house(tmp_path / "art") as here:
        loader, children = Loading(here).loader, here.server.config.server_dir / "children.json"
        loader._file.write_text('{"base_model": "smollm2"}')
        starting = asyncio.create_task(loader.start())
        await until(lambda: loader.fetch_progress == CONVERTING)
        (pid,) = json.loads(children.read_text())
        await loader.stop()
        await starting
        assert json.loads(children.read_text()) == []
        assert not psutil.pid_exists(int(pid)) and os.listdir(tmp_path / "cache") == []


async def test_a_conversion_that_fails_says_why_and_is_tried_again(tmp_path: Path, converted: Path) -> None:
    async with house(tmp_path / "art") as here:
        loading = Loading(here)
        converted.with_name("fails").touch()
        with refused(InvalidInput, "unknown_base_model", "base_model") as raised:
            await loading.loader.load("smollm2")
        assert "No space left on device" in raised.value.message and "conversion.log" in raised.value.message
        converted.with_name("ends").touch()
        assert (await loading.loader.load("smollm2")).path == converted
        await loading.loader.stop()


GPUS = tuple(Gpu(index, f"GPU-{index}", f"card {index}", gib << 30, (9, 0)) for index, gib in ((0, 80), (1, 24)))


async def test_on_a_shared_card_the_trainer_loads_after_the_engine(tmp_path: Path) -> None:
    """vLLM measures the card's free memory when it starts."""
    async with house(tmp_path / "art") as here:
        loading, is_asked, is_ready = Loading(here), asyncio.Event(), asyncio.Event()
        loading.loader._machine = Machine("cuda", GPUS, 256 << 30)

        async def wait_ready(timeout_seconds: float) -> None:
            is_asked.set()
            await is_ready.wait()

        here.engine.wait_ready = wait_ready  # type: ignore[method-assign]
        await loading.loader.load("art/tiny")
        await is_asked.wait()
        assert loading.trained is None
        is_ready.set()
        await until(lambda: loading.trained == TINY_DIR)
        (plan,) = loading.plans
        assert plan.is_base_resident and plan.training_card is None
        await loading.loader.stop()


async def test_each_side_is_planned_on_its_own_card(tmp_path: Path) -> None:
    async with house(tmp_path / "art", serve_devices=(0,), train_devices=(1,)) as here:
        loading = Loading(here)
        loading.loader._machine = Machine("cuda", GPUS, 256 << 30)
        await loading.loader.load("art/tiny")
        await until(lambda: loading.trained == TINY_DIR)
        (plan,) = loading.plans
        assert plan.training_card == Card("card 1", 24 << 30, 256 << 30)
        assert plan.handover == "none"
        await loading.loader.stop()


async def test_ranks_of_other_machines_get_no_plan_of_the_servers_card(tmp_path: Path) -> None:
    keys = (ApiKey(key="joins", scopes=frozenset({"host"})),)
    async with house(tmp_path / "art", ranks=0, api_keys=keys) as here:
        engine = here.engine
        here.server.base._fleet = engine  # type: ignore[assignment]
        loading = Loading(here)
        loading.loader._machine = Machine("cuda", GPUS, 256 << 30)
        await loading.loader.load("art/tiny")
        assert loading.plans == [None]
        await loading.loader.stop()


async def test_a_base_model_that_cannot_be_trained_starts_nothing(tmp_path: Path) -> None:
    quantised = tmp_path / "quantised"
    shutil.copytree(TINY_DIR, quantised)
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (quantised / "config.json").write_text(json.dumps(config))
    async with house(tmp_path / "art") as here:
        loading = Loading(here)
        with refused(InvalidInput, "not_trainable", "base_model"):
            await loading.loader.load(str(quantised))
        assert here.engine.base is None and loading.plans == []
        assert here.engine.progress.lines == [], "nobody waits for it"


async def test_a_trainer_that_cannot_start_hinders_no_stop(tmp_path: Path) -> None:
    async with house(tmp_path / "art") as here:
        loading, has_failed = Loading(here), asyncio.Event()

        async def run(_: object) -> Any:
            has_failed.set()
            raise PermissionError("logs/trainer.log")

        loading.run = run  # type: ignore[method-assign]
        await loading.loader.load("art/tiny")
        await has_failed.wait()
        await loading.loader.stop()
