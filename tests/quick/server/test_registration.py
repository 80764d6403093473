"""Registering, forking, deleting and uploading while a step trains: none of them waits for it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from art_protocol.wire import ForkRequest, LoRAConfig, RegisterRequest
from art_server.errors import Conflict
from art_server.process.shared.trainer_messages import Done, InitTask
from art_server.store.base_models import TINY_DIR, BaseModel
from art_server.store.registry import RegisteredModel
from art_server.trainer.checkpoint import write_first_checkpoint
from tests.new_models import add_model
from tests.quick.checkpoints.house import TINY_LORA, House, house
from tests.waiting import until

pytestmark = pytest.mark.anyio


class SlowTrainer:
    """Writes a step 0 once `aside` is set, as behind a running step or the start of a second process."""

    def __init__(self) -> None:
        self.aside = asyncio.Event()
        self._lock = asyncio.Lock()
        self.shapes: list[LoRAConfig] = []

    async def run(self, task: InitTask) -> Done:
        self.shapes.append(task.lora)
        await self.aside.wait()
        # A process does one task at a time: a model is built under torch's global default type.
        async with self._lock:
            await asyncio.to_thread(write_first_checkpoint, str(TINY_DIR), task.lora, 0, Path(task.out_dir))
        return Done(metrics={})


@contextlib.asynccontextmanager
async def slow_house(root: Path) -> AsyncIterator[tuple[House, SlowTrainer]]:
    async with house(root) as here:
        trainer = SlowTrainer()
        here.server.registration._trainer = trainer  # type: ignore[assignment]
        yield here, trainer


async def register(here: House, name: str, lora: LoRAConfig = TINY_LORA) -> RegisteredModel:
    request = RegisterRequest(project="p", name=name, base_model="art/tiny", lora=lora)
    await here.server.registration.register(request, {}, always_logprobs=True)
    return here.registry.get("p", name)


async def test_nothing_waits_for_the_step_0_of_another_model(tmp_path: Path) -> None:
    async with slow_house(tmp_path) as (here, trainer):
        trainer.aside.set()
        known = await register(here, "known")
        trainer.aside.clear()
        new = asyncio.create_task(register(here, "new"))
        await until(lambda: len(trainer.shapes) == 2)
        assert await register(here, "known") is known
        fork = await here.server.checkpoints.fork(known, ForkRequest(project="p", name="fork"))
        assert fork.folder.steps() == [0]
        await here.server.checkpoints.delete_model(known)
        assert here.registry.find("p", "new") is None and not new.done()
        trainer.aside.set()
        assert (await new).step == 0


async def test_another_base_for_an_existing_model_is_answered_with_its_own(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        here.engine.base = None
        add_model(here.registry, "known", "own", project="q")
        request = RegisterRequest(name="known", project="q", base_model="other")
        with pytest.raises(Conflict, match=r"adapts base model 'own': .*base_model='own'"):
            await here.server.registration.register(request)


async def test_two_registrations_of_one_name_make_one_model(tmp_path: Path) -> None:
    async with slow_house(tmp_path) as (here, trainer):
        loras = (TINY_LORA, TINY_LORA, LoRAConfig(rank=8))
        tasks = [asyncio.create_task(register(here, "a", lora)) for lora in loras]
        await until(lambda: len(trainer.shapes) == 3)
        trainer.aside.set()
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
    async with slow_house(tmp_path) as (here, trainer):
        tasks = [asyncio.create_task(register(here, name)) for name in ("Agent", "agent")]
        await until(lambda: len(trainer.shapes) == 2)
        trainer.aside.set()
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
    async with slow_house(tmp_path) as (here, trainer):
        trainer.aside.set()
        base = BaseModel("art/tiny", TINY_DIR)
        vars(base)["facts"] = base.facts.model_copy(update={"notes": ("a note",)})
        here.engine.base = base
        request = RegisterRequest(project="p", name="told", base_model="art/tiny", lora=TINY_LORA)
        assert (await here.server.registration.register(request)).notes == ["a note"]
        assert here.server.registration.info(here.registry.get("p", "told")).notes == []
