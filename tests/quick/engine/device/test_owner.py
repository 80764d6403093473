"""The device owner: for any events in any order, engine and trainer are never on a device that has no room for both, nothing
gets stuck, every request is answered, and every job makes its step. Runs the real owner, supervisor, pause gate and job
runner on a fake device (`fake_device.py`)."""

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from art_protocol.wire import JobReport, TrainConfig
from art_server.engine import engine
from art_server.engine.device.owner import DeviceOwner
from art_server.engine.device.plan import make_memory_plan
from art_server.engine.engine import LOAD_SECONDS, MAX_FAILED_STARTS, AdapterRefused, Engine, EngineDied
from art_server.engine.failures import Cause
from art_server.engine.fleet import Fleet
from art_server.engine.pause_gate import PauseGate
from art_server.errors import Unavailable
from art_server.jobs.backoff import MAX_DOUBTFUL
from art_server.jobs.job_row import Payload
from art_server.jobs.queue import JobQueue
from art_server.jobs.runner import JobRunner
from art_server.ledger.intake import RecordReceiver
from art_server.ledger.ledger import Ledger
from art_server.models.checkpoints import Checkpoints
from art_server.process.background import Background
from art_server.process.progress import StartProgress
from art_server.settings import ServerConfig
from art_server.shared.trainer_messages import Batch, LoadTask
from art_server.store.base_models import TINY_DIR, BaseModel
from art_server.store.registry import Registry
from tests.contracts import check_engine, check_vllm
from tests.fakes.parts import keep_all
from tests.makers.new_models import add_model
from tests.quick.engine.device.cards import card, demand
from tests.quick.engine.device.fake_device import (
    Clash,
    FakeProcess,
    OnFakeDevice,
    TrainerOnDevice,
    World,
    write_adapter,
)
from tests.refusals import refused
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.anyio

MODELS = ("a", "b")
SECONDS = PATIENCE_SECONDS
"""Time limit of a whole story, because a stuck one never ends."""

CASES = {
    "none": ("4B", "80 GB"),
    "sleep": ("8B", "24 GB"),
    "own": ("8B", "24 GB"),
}
"""A model and a card for each way to share the card; in the last case the trainer has a second card."""


def make_world(case: str, happens: dict[str, list[str]]) -> World:
    model, on = CASES[case]
    own = card(on) if case == "own" else None
    plan = make_memory_plan(card(on), replace(demand(model), training_card=own))
    assert plan.handover == ("none" if own else case)
    return World(plan, happens)


class House:
    """The parts of a server that share a device."""

    def __init__(self, world: World, folder: Path):
        self.world = world
        config = ServerConfig(path=folder)
        self.owner, self.gate = DeviceOwner(), PauseGate(clock=world.clock)
        self.background = Background(clock=world.clock)
        shared: dict[str, Any] = {"progress": StartProgress(), "changed": asyncio.Condition()}
        self.engine = Engine(
            location=OnFakeDevice(world),
            config=config,
            owner=self.owner,
            receiver=RecordReceiver(lambda *_: None, lambda _: None, lambda *_: None),
            is_busy=lambda: self.gate.num_inside > 0,
            background=self.background,
            name="engine",
            clock=world.clock,
            **shared,
        )
        self.fleet = Fleet(replicas=[self.engine], config=config, clock=world.clock, **shared)
        between = "stay" if world.plan.is_base_resident else "leave"
        self.trainer: Any = TrainerOnDevice(world, between)
        self.registry = Registry(folder)
        for name in MODELS:
            add_model(self.registry, name, write=write_adapter)
        self.queue = JobQueue(self.registry.database, clock=world.clock)
        self.runner = JobRunner(
            queue=self.queue,
            registry=self.registry,
            fleet=self.fleet,
            gate=self.gate,
            trainer=self.trainer,
            owner=self.owner if world.plan.training_card is None else None,
            retain=keep_all,
            clock=world.clock,
        )

    def start(self) -> None:
        self.fleet.start(BaseModel("base", TINY_DIR), {}, self.world.plan)
        self.background.start("job runner", self.runner.run_forever)
        if self.world.plan.is_base_resident:
            self.world.background(self._warm())

    async def _warm(self) -> None:
        async with self.owner.held():
            await self.trainer.run(LoadTask())

    async def stop(self) -> None:
        await self.background.stop("job runner")
        await self.fleet.stop()
        assert self.background.num_faults == {}
        await self.world.settle()
        self.registry.database.close()

    def add_job(self, name: str) -> str:
        payload = Payload.make(Batch(groups=[]))
        report = JobReport(num_rows=0)
        return self.queue.insert(
            self.registry.get("p", name).number, None, "digest", TrainConfig(), payload, report
        ).job_id

    async def ask(self, name: str) -> str:
        """Sends one request until it is answered, as the API does; returns the adapter that answered."""
        model = self.registry.get("p", name)
        while True:
            try:
                await self.gate.wait_open(SECONDS)
                adapter = model.adapter_name(model.step)
                folder = model.folder.checkpoint_dir(model.step)
                await self.fleet.load_adapter(adapter, folder, SECONDS)
                await self.fleet.wait_ready(SECONDS)
                await self.gate.wait_open(SECONDS)
                with self.gate.inside(adapter):
                    async with self.engine.http.post("/v1/completions", json={"model": adapter}) as response:
                        if response.status == 200:
                            return (await response.json())["model"]
            except (aiohttp.ClientError, Unavailable):
                await asyncio.sleep(0.01)

    async def keep_asking(self, name: str, until: asyncio.Event) -> int:
        answered = 0
        while not until.is_set():
            await self.ask(name)
            answered += 1
            await asyncio.sleep(0.002)
        return answered

    async def wait_jobs(self, jobs: list[str]) -> None:
        self.runner._wake()
        await until(lambda: all(self.queue.get(job).state in ("done", "failed") for job in jobs))


class Watch:
    """Of an engine: five seconds pass on its machine from one look at its work to the next."""

    def __init__(self, world: World) -> None:
        self.num_looks = 0
        self.is_working = False
        """The engine computes something before each look."""
        self._read = world.read_work
        world.seconds = lambda: 5.0 * self.num_looks  # type: ignore[method-assign]
        world.read_work = self._look  # type: ignore[method-assign]

    def _look(self, file: Path) -> bytes:
        self.num_looks += 1
        if self.is_working:
            file.write_text(f"{self.num_looks} tokens")
        return self._read(file)


@contextlib.asynccontextmanager
async def running(world: World, folder: Path) -> AsyncIterator[House]:
    house = House(world, folder)
    house.start()
    try:
        yield house
    finally:
        await house.stop()


async def play(world: World, folder: Path, num_jobs: int = 3) -> House:
    """Runs jobs of two models while both get requests. Returns when all jobs have ended and the newest step of each
    model has answered a last request."""
    async with running(world, folder) as house, asyncio.timeout(SECONDS):
        over = asyncio.Event()
        askers = [asyncio.create_task(house.keep_asking(name, over)) for name in MODELS * 2]
        jobs = [house.add_job(MODELS[index % 2]) for index in range(num_jobs)]
        await house.wait_jobs(jobs)
        over.set()
        answered = await asyncio.gather(*askers)
        assert all(answered)
        for name in MODELS:
            model = house.registry.get("p", name)
            assert await house.ask(name) == model.adapter_name(model.step)
        done = [house.queue.get(job).state for job in jobs]
        if world.num_trainer_deaths <= MAX_DOUBTFUL:
            assert done == ["done"] * num_jobs, [house.queue.get(job).last_error for job in jobs]
            steps = {name: house.registry.get("p", name).step for name in MODELS}
            assert steps == {"a": (num_jobs + 1) // 2, "b": num_jobs // 2}
        return house


def assert_right(world: World) -> None:
    assert world.device.wrongs == [] and world.trainer_device.wrongs == []


@pytest.mark.parametrize("case", CASES)
async def test_steps_without_trouble(case: str, tmp_path: Path) -> None:
    world = make_world(case, {})
    await play(world, tmp_path)
    assert_right(world)
    told = "sleep" if case == "sleep" else "pause"
    assert world.seen.count(told) == (0 if case == "own" else 3)
    assert world.seen.count("engine starts") == 1


@pytest.mark.parametrize("case", CASES)
async def test_an_engine_that_dies_during_a_step_waits_for_the_device(case: str, tmp_path: Path) -> None:
    happens = {"trains": ["kill engine"] * 3, "backward": ["slow"] * 3}
    world = make_world(case, happens)
    await play(world, tmp_path)
    assert_right(world)
    assert world.seen.count("engine starts") == 4


async def test_an_engine_that_works_is_not_hung_and_one_that_does_not_is(tmp_path: Path) -> None:
    """No request ends meanwhile in either case."""
    world = make_world("none", {})
    watch = Watch(world)
    async with running(world, tmp_path) as house:
        assert await house.ask("a") == "p/a@0"
        with house.gate.inside("p/a@0"):
            watch.is_working, before = True, watch.num_looks
            await until(lambda: watch.num_looks > before + 30)
            assert world.seen.count("engine starts") == 1
            watch.is_working = False
            assert world.process is not None
            world.process.computes.clear()
            await until(lambda: world.seen.count("engine starts") == 2)
    assert_right(world)


async def test_a_single_engine_gets_every_request_without_its_key(tmp_path: Path) -> None:
    def read() -> bytes:
        raise AssertionError("the key is a digest of the conversation, which nobody has to read")

    async with running(make_world("none", {}), tmp_path) as house, asyncio.timeout(SECONDS):
        folder = house.registry.get("p", "a").folder.checkpoint_dir(0)
        for name, path in (("p/a@0", folder), ("base", None)):
            with contextlib.ExitStack() as stack:
                assert await house.fleet.reach(name, path, read, SECONDS, stack) is house.engine
                assert house.engine.num_requests == 1
        assert house.engine.num_requests == 0 and house.engine.holds("p/a@0")


async def test_a_single_engine_that_does_not_load_an_adapter_in_time_is_asked_again(tmp_path: Path) -> None:
    """Of several it would be ended, so that the step serves from the others."""
    world = make_world("none", {})
    async with running(world, tmp_path) as house, asyncio.timeout(SECONDS):
        await house.fleet.wait_ready(SECONDS)
        reach = world.reach

        async def hang_once(phase: str) -> str:
            if phase == "adapter loads":
                world.reach = reach  # type: ignore[method-assign]
                world.clock.advance(LOAD_SECONDS)
                await asyncio.Event().wait()
            return await reach(phase)

        world.reach = hang_once  # type: ignore[method-assign]
        folder = house.registry.get("p", "a").folder.checkpoint_dir(0)
        await house.fleet.load_adapter("p/a@0", folder, SECONDS)
        assert house.engine.holds("p/a@0") and house.engine.num_starts == 1


async def test_a_request_whose_adapter_cannot_be_delivered_waits_until_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world("none", {})
    async with running(world, tmp_path) as house, asyncio.timeout(SECONDS):
        await house.fleet.wait_ready(SECONDS)
        folder, location = house.registry.get("p", "a").folder.checkpoint_dir(0), house.engine.location
        assert isinstance(location, OnFakeDevice)
        location.is_full = True
        with refused(Unavailable, "engine_not_ready") as raised, contextlib.ExitStack() as stack:
            await house.fleet.reach("p/a@0", folder, lambda: b"", 0.1, stack)
        assert (
            "adapter 'p/a@0': its files cannot be delivered (host h: No space left on device)" in raised.value.message
        )
        assert house.engine.num_requests == 0 and location.num_deliveries > 1 and raised.value.retryable
        location.is_full = False
        with contextlib.ExitStack() as stack:
            assert await house.fleet.reach("p/a@0", folder, lambda: b"", SECONDS, stack) is house.engine


@pytest.mark.parametrize("is_left", [True, False])
async def test_an_engine_that_restarts_while_its_machine_is_full_waits_for_room(is_left: bool, tmp_path: Path) -> None:
    """It also serves if nobody needs the adapter any more."""
    world = make_world("none", {})
    async with running(world, tmp_path) as house, asyncio.timeout(SECONDS):
        assert await house.ask("a") == "p/a@0"
        location = house.engine.location
        assert isinstance(location, OnFakeDevice) and world.process is not None
        location.is_full = True
        tries = location.num_deliveries
        world.process.kill()
        await until(lambda: location.num_deliveries > tries + MAX_FAILED_STARTS or house.engine.state == "failed")
        assert house.engine.state == "starting"
        assert "cannot be delivered (host h: No space left on device)" in (house.fleet.start_waited_for or "")
        if is_left:
            house.fleet.unload_adapter("p/a@0")
        else:
            location.is_full = False
        await house.fleet.wait_ready(SECONDS)
        assert house.engine.num_starts == 2 and house.engine.holds("p/a@0") != is_left


LASTING = Cause("vLLM cannot run this base model here", is_lasting=True)


async def test_a_base_that_vllm_cannot_run_is_started_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "find_cause", lambda _: LASTING)
    world = make_world("none", {"engine starts": ["kill engine"] * MAX_FAILED_STARTS})
    async with running(world, tmp_path) as house, asyncio.timeout(SECONDS):
        with refused(Unavailable, "engine_failed") as raised:
            await house.fleet.wait_ready(SECONDS)
        assert house.engine.num_starts == 1 and LASTING.sentence in raised.value.message


async def test_an_engine_that_has_served_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its log says: the same base has run here."""
    monkeypatch.setattr(engine, "find_cause", lambda _: LASTING)
    world = make_world("none", {"engine starts": ["", "kill engine", "kill engine"]})
    async with running(world, tmp_path) as house, asyncio.timeout(SECONDS):
        assert await house.ask("a") == "p/a@0" and world.process is not None
        world.process.kill()
        await until(lambda: house.engine.num_starts == 4 and house.engine.state == "ready")


async def test_the_engine_wakes_while_the_step_is_written(tmp_path: Path) -> None:
    world = make_world("sleep", {})
    async with running(world, tmp_path) as house, asyncio.timeout(SECONDS):
        assert await house.ask("a") == "p/a@0"
        assert house.engine.max_seq_length == 4096, "what vLLM says that it took"
        reach, awake = world.reach, asyncio.Event()

        async def in_order(phase: str) -> str:
            event = await reach(phase)
            if phase == "wake_up":
                awake.set()
            if phase == "saves":
                await awake.wait()
            return event

        world.reach = in_order  # type: ignore[method-assign]
        await house.wait_jobs([house.add_job("a")])
    assert_right(world)


async def test_a_trainer_with_a_device_of_its_own_stops_nobody(tmp_path: Path) -> None:
    """A request is answered while the trainer works."""
    world = make_world("own", {})
    async with running(world, tmp_path) as house, asyncio.timeout(SECONDS):
        begun, go_on = asyncio.Event(), asyncio.Event()
        reach = world.reach

        async def wait_in_training(phase: str) -> str:
            if phase == "backward":
                begun.set()
                await go_on.wait()
            return await reach(phase)

        world.reach = wait_in_training  # type: ignore[method-assign]
        job = house.add_job("a")
        house.runner._wake()
        await begun.wait()
        assert await house.ask("a") == "p/a@0"
        go_on.set()
        await house.wait_jobs([job])
        assert await house.ask("a") == "p/a@1"


async def test_a_disk_without_room_delays_an_engines_restart_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world("none", {})
    async with running(world, tmp_path) as house, asyncio.timeout(SECONDS):
        assert await house.ask("a") == "p/a@0"
        start, num_full = house.engine.location.start, 5

        async def full(*arguments: Any) -> Any:
            nonlocal num_full
            if num_full:
                num_full -= 1
                raise OSError(errno.ENOSPC, "No space left on device")
            return await start(*arguments)

        monkeypatch.setattr(house.engine.location, "start", full)
        assert world.process is not None
        world.process.kill()
        await until(lambda: house.background.faults)
        assert house.engine.state == "starting"
        assert await house.ask("a") == "p/a@0", "more failures than an engine of its own may have"
        assert house.background.num_faults.pop("engine supervisor") == 5
    assert_right(world)


async def test_whoever_lost_the_engine_waits_until_its_end_is_noticed(tmp_path: Path) -> None:
    """Else the request would be sent to the dying engine again, and be refused as the cause of two deaths."""
    world = make_world("none", {})
    async with running(world, tmp_path) as house, asyncio.timeout(SECONDS):
        assert await house.ask("a") == "p/a@0"
        await house.engine.notice_end()  # it answers
        assert house.engine.state == "ready" and world.process is not None
        world.process.kill()
        await world.process.wait()
        await house.engine.notice_end()
        assert house.engine.was_killed
        assert await house.ask("a") == "p/a@0"


async def test_an_adapter_that_does_not_load_at_a_restart_is_refused_alone(tmp_path: Path) -> None:
    world = make_world("none", {})
    async with running(world, tmp_path) as house, asyncio.timeout(SECONDS):
        assert await house.ask("a") == "p/a@0"
        assert await house.ask("b") == "p/b@0"
        (house.registry.get("p", "a").folder.checkpoint_dir(0) / "adapter_config.json").unlink()
        assert world.process is not None
        world.process.kill()
        assert await house.ask("b") == "p/b@0"
        assert house.engine.loaded_adapters() == ["p/b@0"]
        with refused(AdapterRefused, "adapter_refused"):
            folder = house.registry.get("p", "a").folder.checkpoint_dir(0)
            await house.fleet.load_adapter("p/a@0", folder, SECONDS)
        assert house.engine.state == "ready"


async def test_a_step_that_is_made_again_is_loaded_again(tmp_path: Path) -> None:
    """After a rollback the same name has other weights: the engine must not keep the old ones."""
    world = make_world("sleep", {})
    async with running(world, tmp_path) as house, asyncio.timeout(SECONDS):
        checkpoints = Checkpoints(
            registry=house.registry,
            queue=house.queue,
            gate=house.gate,
            fleet=house.fleet,
            ledger=Ledger(tmp_path / "ledger.sqlite"),
            incoming=tmp_path / "incoming",
            keep_last=0,
        )
        model = house.registry.get("p", "a")
        await house.wait_jobs([house.add_job("a"), house.add_job("a")])
        assert await house.ask("a") == "p/a@2"
        assert world.process is not None and "p/a@2" in world.process.adapters
        await checkpoints.roll_back(model, 1)
        assert await house.ask("a") == "p/a@1"
        loads = world.seen.count("adapter loads")
        await house.wait_jobs([house.add_job("a")])
        assert world.seen.count("reset_prefix_cache") == 1
        assert world.seen.count("adapter loads") == loads + 1
        assert await house.ask("a") == "p/a@2" and model.folder.steps() == [0, 1, 2]
        assert "p/a@2" in world.process.adapters
        world.happens["reset_prefix_cache"] = ["refuse"]
        await checkpoints.roll_back(model, 1)
        await house.wait_jobs([house.add_job("a")])
        assert await house.ask("a") == "p/a@2"
        assert world.seen.count("engine starts") == 2, "one that keeps its prompts is ended"
    assert_right(world)


async def test_a_caller_that_leaves_during_a_load_leaves_no_trace(tmp_path: Path) -> None:
    """vLLM goes on loading, and refuses a name that it has already."""
    world = make_world("none", {"adapter loads": ["slow"]})
    async with running(world, tmp_path) as house, asyncio.timeout(SECONDS):
        folder = house.registry.get("p", "a").folder.checkpoint_dir(0)
        leaving = asyncio.create_task(house.fleet.load_adapter("p/a@0", folder, SECONDS))
        while "adapter loads" not in world.seen:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        leaving.cancel()
        await asyncio.wait({leaving})
        assert leaving.cancelled() and house.owner._lock.locked(), "the device is vLLM's until it has loaded"
        assert await house.ask("a") == "p/a@0"
        assert world.seen.count("adapter loads") == 1
        # The answer of a load can be lost, too.
        house.engine._adapters.clear()
        assert await house.ask("a") == "p/a@0"
        assert world.process is not None and world.process.adapters == ["p/a@0"]
    assert_right(world)


async def test_a_request_whose_client_does_not_read_is_no_hung_engine(tmp_path: Path) -> None:
    """It is asked for a token now and then."""
    world = make_world("none", {})
    watch = Watch(world)
    async with running(world, tmp_path) as house:
        assert await house.ask("a") == "p/a@0"
        with house.gate.inside("p/a@0"):
            before = watch.num_looks
            await until(lambda: watch.num_looks > before + 30 and world.num_sampled > 3)
        assert world.seen.count("engine starts") == 1
    assert_right(world)


async def test_an_engine_that_dies_while_it_renders_is_met_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world("none", {})
    async with running(world, tmp_path) as house, asyncio.timeout(SECONDS):
        await house.engine.wait_ready(SECONDS)

        async def lose(*_: Any) -> None:
            raise aiohttp.ServerDisconnectedError

        monkeypatch.setattr(house.engine, "_post", lose)
        with refused(EngineDied, "engine_failed") as died:
            await house.engine.tokenize({"prompt": "a"})
        assert died.value.retryable


PHASES = ("engine starts", "engine loads", "adapter loads", "pause", "sleep", "trains", "backward")
PHASES += ("saves", "wake_up", "resume")
EVENTS = ("", "slow", "kill engine")
TOLD = ("pause", "sleep", "wake_up", "resume")


@st.composite
def troubles(draw: st.DrawFn) -> dict[str, list[str]]:
    """Draws the events of each phase. The engine dies at most twice while it starts, because the server gives up after
    three deaths."""
    happens: dict[str, list[str]] = {}
    for phase in draw(st.lists(st.sampled_from(PHASES), min_size=1, max_size=4, unique=True)):
        events = EVENTS + (("refuse", "hang") if phase in TOLD else ())
        events += ("die",) if phase == "trains" else ()
        most = 1 if phase.startswith("engine") or phase == "adapter loads" else 2
        happens[phase] = draw(st.lists(st.sampled_from(events), min_size=1, max_size=most))
    return happens


@pytest.mark.parametrize("case", CASES)
@settings(
    max_examples=8,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(happens=troubles())
def test_all_orders(case: str, happens: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> None:
    world = make_world(case, {phase: list(events) for phase, events in happens.items()})
    asyncio.run(play(world, tmp_path_factory.mktemp("story")))
    assert_right(world)


async def test_an_engine_wakes_whole_when_a_job_fails(tmp_path: Path) -> None:
    world = make_world("sleep", {"trains": ["die"] * (2 * MAX_DOUBTFUL + 1)})
    house = await play(world, tmp_path)
    assert_right(world)
    assert world.seen.count("engine starts") == 1
    assert sum(house.registry.get("p", name).step for name in MODELS) == 2, "of three jobs one has failed"


@pytest.mark.parametrize("path", ["refuse", "hang"])
@pytest.mark.parametrize("case", [case for case in CASES if case != "own"])
@pytest.mark.parametrize("told", ["before", "after"])
async def test_an_engine_that_does_not_pause_or_wake_is_started_again(
    case: str, told: str, path: str, tmp_path: Path
) -> None:
    before = {"none": "pause", "sleep": "sleep"}
    after = {"none": "resume", "sleep": "wake_up"}
    world = make_world(case, {(before if told == "before" else after)[case]: [path]})
    house = await play(world, tmp_path)
    assert_right(world)
    assert world.seen.count("engine starts") == 2
    assert not house.engine._paused


# --- as the real ones (tests/engine/integration/test_contracts.py) ---


async def test_the_fake_process_keeps_the_contract_of_vllm(tmp_path: Path) -> None:
    async with running(make_world("none", {}), tmp_path) as house, asyncio.timeout(SECONDS):
        await house.engine.wait_ready(SECONDS)
        adapter = house.registry.get("p", "a").folder.checkpoint_dir(0)
        await check_vllm(house.engine.http, adapter, tmp_path / "nothing")


async def test_the_engine_keeps_the_contract_of_its_fake(tmp_path: Path) -> None:
    async with running(make_world("none", {}), tmp_path) as house, asyncio.timeout(SECONDS):
        adapter = house.registry.get("p", "a").folder.checkpoint_dir(0)
        await check_engine(house.fleet, adapter, "p/b@0", SECONDS)


# --- what the fake device detects ---


def test_the_device_names_who_does_not_fit() -> None:
    device = make_world("sleep", {}).device
    device.enter("engine 1", "kv")
    with pytest.raises(Clash):
        device.enter("trainer", "base")
    assert device.wrongs == ["trainer's base comes beside engine 1's kv"]
    device.leave("engine 1", "kv")
    device.enter("trainer", "base")
    assert device.present == {("trainer", "base")}


def test_where_both_fit_an_engine_starts_beside_the_base_and_not_beside_a_step() -> None:
    device = make_world("none", {}).device
    device.enter("trainer", "base")
    device.enter("engine 1", "start")
    with pytest.raises(Clash):
        device.enter("trainer", "step")
    device.leave("engine 1", "start")
    device.enter("trainer", "step")
    with pytest.raises(Clash):
        device.enter("engine 2", "start")


async def test_an_adapter_loaded_into_unmapped_weights_ends_the_engine(tmp_path: Path) -> None:
    world = make_world("sleep", {})
    async with running(world, tmp_path) as house, asyncio.timeout(SECONDS):
        assert await house.ask("a") == "p/a@0"
        process = world.process
        assert process is not None
        process.gave_up.add("weights")
        with pytest.raises(aiohttp.ClientError):
            await house.engine.http.post(
                "/v1/load_lora_adapter", json={"lora_name": "p/b@0", "lora_path": str(tmp_path)}
            )
        assert process.returncode == -11
    assert world.device.wrongs == ["illegal memory access: an adapter is loaded into unmapped weights"]


async def test_an_engine_that_starts_beside_the_trainer_is_wrong(tmp_path: Path) -> None:
    world = make_world("sleep", {})
    world.device.enter("trainer", "base")
    process = FakeProcess(world, tmp_path / "socket", tmp_path / "work")
    assert await process.wait() == 1
    await world.settle()
    assert len(world.device.wrongs) == 1


# --- the lock ---


async def test_the_same_story_with_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world("sleep", {"backward": ["slow"] * 3, "adapter loads": ["slow"] * 3})
    monkeypatch.setattr(PauseGate, "wait_open", lambda *_: asyncio.sleep(0))
    await play(world, tmp_path)
    assert_right(world)
