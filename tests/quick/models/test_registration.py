"""Registering, forking, deleting and uploading: none waits for another, nor for a step, and none needs a trainer's process."""

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from art_protocol.wire import ForkRequest, LoRAConfig, RegisterRequest, TrainConfig
from art_server.errors import Conflict, InvalidInput
from art_server.jobs.trainer import ServerTrainer
from art_server.jobs.trainer_process import TrainerDied
from art_server.models import registration
from art_server.shared.trainer_messages import Progress, TrainTask
from art_server.store.base_models import TINY_DIR, BaseModel
from art_server.store.first_step import write_first_step
from art_server.store.registry import RegisteredModel
from tests.fakes.places import HereInstead
from tests.makers.new_models import add_model
from tests.makers.registering import counted_starts, make_models
from tests.quick.models.house import TINY_LORA, House, house
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.anyio


class SlowDisk:
    """Takes a step 0 once `may_write` is set."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.shapes: list[LoRAConfig] = []

    def write_first_step(self, base: BaseModel, lora: LoRAConfig, folder: Path) -> None:
        self.shapes.append(lora)
        assert self.may_write.wait(PATIENCE_SECONDS)
        write_first_step(base, lora, folder)


@contextlib.asynccontextmanager
async def slow_house(root: Path) -> AsyncIterator[tuple[House, SlowDisk]]:
    disk = SlowDisk()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registration, "write_first_step", disk.write_first_step)
        async with house(root) as here:
            yield here, disk


async def register(here: House, name: str, lora: LoRAConfig = TINY_LORA) -> RegisteredModel:
    request = RegisterRequest(project="p", name=name, base_model="art/tiny", lora=lora)
    await here.server.registration.register(request, {}, always_logprobs=True)
    return here.registry.get("p", name)


async def test_nothing_waits_for_the_step_0_of_another_model(tmp_path: Path) -> None:
    async with slow_house(tmp_path) as (here, disk):
        disk.may_write.set()
        known = await register(here, "known")
        disk.may_write.clear()
        new = asyncio.create_task(register(here, "new"))
        await until(lambda: len(disk.shapes) == 2)
        assert await register(here, "known") is known
        fork = await here.server.checkpoints.fork(known, ForkRequest(project="p", name="fork"))
        assert fork.folder.steps() == [0]
        await here.server.checkpoints.delete_model(known)
        assert here.registry.find("p", "new") is None and not new.done()
        disk.may_write.set()
        assert (await new).step == 0


async def test_another_base_for_an_existing_model_is_answered_with_its_own(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        here.engine.base = None
        add_model(here.registry, "known", "own", project="q")
        request = RegisterRequest(name="known", project="q", base_model="other")
        with pytest.raises(Conflict, match=r"adapts base model 'own': .*base_model='own'"):
            await here.server.registration.register(request)


async def test_two_registrations_of_one_name_make_one_model(tmp_path: Path) -> None:
    async with slow_house(tmp_path) as (here, disk):
        loras = (TINY_LORA, TINY_LORA, LoRAConfig(rank=8))
        tasks = [asyncio.create_task(register(here, "a", lora)) for lora in loras]
        await until(lambda: len(disk.shapes) == 3)
        disk.may_write.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        model = here.registry.get("p", "a")
        for lora, result in zip(loras, results, strict=True):  # any of them can be the first
            if lora == model.record.lora:
                assert result is model
            else:
                assert isinstance(result, Conflict), "another shape"
        assert model.folder.steps() == [0]
        assert [entry.name for entry in model.folder.path.parent.iterdir()] == ["a"]


async def test_of_names_that_differ_by_case_the_first_is_registered(tmp_path: Path) -> None:
    async with slow_house(tmp_path) as (here, disk):
        tasks = [asyncio.create_task(register(here, name)) for name in ("Agent", "agent")]
        await until(lambda: len(disk.shapes) == 2)
        disk.may_write.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        (refused,) = (result for result in results if isinstance(result, Conflict))
        (model,) = here.registry.all()
        assert refused.code == "name_differs_by_case"
        assert model.record.name in refused.message
        assert [entry.name for entry in model.folder.path.parent.iterdir()] == [model.record.name]


async def test_a_loaded_base_model_is_known_while_the_loader_is_busy(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        loader = here.server.base
        async with loader._lock:  # of a registration that names another base model
            assert await loader.load("art/tiny") == BaseModel("art/tiny", TINY_DIR)


async def test_a_registration_says_what_the_chat_template_does_not_take(tmp_path: Path) -> None:
    async with slow_house(tmp_path) as (here, disk):
        disk.may_write.set()
        base = BaseModel("art/tiny", TINY_DIR)
        vars(base)["facts"] = base.facts.model_copy(update={"notes": ("a note",)})
        here.engine.base = base
        request = RegisterRequest(project="p", name="told", base_model="art/tiny", lora=TINY_LORA)
        assert (await here.server.registration.register(request)).notes == ["a note"]
        assert here.server.registration.info(here.registry.get("p", "told")).notes == []


async def test_layers_that_the_model_lacks_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        with pytest.raises(InvalidInput, match=r"target_modules names nothing, but .* choose from .*q_proj") as refused:
            await register(here, "a", LoRAConfig(target_modules=["q_proj", "nothing"]))
        assert (refused.value.code, refused.value.param) == ("unknown_layers", "lora")
        assert here.registry.find("p", "a") is None and not here.registry.folder("p", "a").steps()


TRAINS_FOR_EVER = """
import sys, time
print('{"event":"ready"}', flush=True)
sys.stdin.readline()
print('{"event":"progress","phase":"train","completed":1,"total":2}', flush=True)
time.sleep(1000)
"""


async def test_beside_a_step_no_trainer_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = counted_starts(monkeypatch)
    begun = asyncio.Event()

    async def note(_: Progress) -> None:
        begun.set()

    async with house(tmp_path, make_trainer=ServerTrainer) as here, here.client() as http:
        trainer = here.server.trainer
        trainer.set_base(TINY_DIR)
        trainer.ranks[0].location = HereInstead(lambda _: [sys.executable, "-c", TRAINS_FOR_EVER])
        task = TrainTask(lora=LoRAConfig(), in_dir="0", out_dir="1", config=TrainConfig())
        training = asyncio.create_task(trainer.run(task, note))
        await begun.wait()
        await make_models(http)
        assert not training.done() and len(starts) == 1, "only the step's own process"
        await trainer.stop()
        with pytest.raises(TrainerDied):
            await training
        assert {model.record.name for model in here.registry.all()} == {"registered", "uploaded", "forked"}
