"""A fleet of two replicas: a step serves from all or from none, a lost replica's requests go to the other, and both pause
while a step trains. Real engines, router, pause gate and job runner, with fake processes on two fake cards
(`fake_device.py`), of which the trainer shares the first."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from art_protocol.wire import JobReport, TrainConfig
from art_server.engine.device.owner import AllDevices, DeviceOwner
from art_server.engine.device.plan import make_memory_plan
from art_server.engine.engine import (
    LOAD_SECONDS,
    MAX_FAILED_STARTS,
    AdapterRefused,
    Engine,
    EngineDied,
    NotDelivered,
    PolicyDiffers,
)
from art_server.engine.fleet import Fleet
from art_server.engine.pause_gate import PauseGate
from art_server.errors import Unavailable
from art_server.jobs.job_row import Payload
from art_server.jobs.queue import JobQueue
from art_server.jobs.runner import JobRunner
from art_server.ledger.intake import RecordReceiver
from art_server.process.background import Background
from art_server.process.progress import StartProgress
from art_server.settings import ServerConfig
from art_server.shared.trainer_messages import Batch
from art_server.store.base_models import TINY_DIR, BaseModel
from art_server.store.registry import Registry
from tests.fakes.clock import FakeClock
from tests.fakes.parts import keep_all
from tests.makers.new_models import add_model
from tests.quick.engine.device.cards import card, demand
from tests.quick.engine.device.fake_device import FakeProcess, OnFakeDevice, TrainerOnDevice, World, write_adapter
from tests.refusals import refused
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.anyio

SECONDS = PATIENCE_SECONDS
MODELS = ("a", "b")


def make_world(happens: dict[str, list[str]], clock: FakeClock) -> World:
    """A card of its own for a replica that sleeps during a step."""
    plan = make_memory_plan(card("24 GB"), replace(demand("8B"), num_engines=2))
    assert plan.handover == "sleep"
    return World(plan, happens, clock)


class House:
    """The parts of a server that share the devices."""

    def __init__(self, worlds: tuple[World, World], folder: Path):
        self.worlds, self.folder = worlds, folder
        self.clock = worlds[0].clock
        owners = [DeviceOwner() for _ in worlds]
        self.owner, self.gate, self.background = (
            AllDevices(owners),
            PauseGate(clock=self.clock),
            Background(clock=self.clock),
        )
        shared = {"progress": StartProgress(), "changed": asyncio.Condition()}
        self.replicas = [
            self._replica(number, world, owner, shared)
            for number, (world, owner) in enumerate(zip(worlds, owners, strict=True))
        ]
        self.fleet = Fleet(replicas=self.replicas, config=ServerConfig(path=folder), clock=self.clock, **shared)
        self.registry = Registry(folder)
        for name in MODELS:
            add_model(self.registry, name, write=write_adapter)
        self.queue = JobQueue(self.registry.database, clock=self.clock)
        self.trainer: Any = TrainerOnDevice(worlds[0], "leave")
        self.runner = JobRunner(
            queue=self.queue,
            registry=self.registry,
            fleet=self.fleet,
            gate=self.gate,
            trainer=self.trainer,
            owner=self.owner,
            retain=keep_all,
            clock=self.clock,
        )

    def _replica(self, number: int, world: World, owner: DeviceOwner, shared: dict[str, Any]) -> Engine:
        return Engine(
            location=OnFakeDevice(world),
            config=ServerConfig(path=self.folder),
            owner=owner,
            receiver=RecordReceiver(lambda *_: None, lambda _: None, lambda *_: None),
            is_busy=lambda: self.gate.num_inside > 0,
            background=self.background,
            name=f"engine-{number}",
            clock=self.clock,
            **shared,
        )

    def start(self) -> None:
        self.fleet.start(BaseModel("base", TINY_DIR), {}, self.worlds[0].plan)
        self.background.start("job runner", self.runner.run_forever)

    async def all_ready(self) -> None:
        await until(lambda: all(replica.state == "ready" for replica in self.replicas))

    async def stop(self) -> None:
        await self.background.stop("job runner")
        await self.fleet.stop()
        assert self.background.num_faults == {}
        for world in self.worlds:
            await world.settle()
        self.registry.database.close()

    def process(self, number: int) -> FakeProcess:
        process = self.worlds[number].process
        assert process is not None
        return process

    def location(self, number: int) -> OnFakeDevice:
        location = self.replicas[number].location
        assert isinstance(location, OnFakeDevice)
        return location

    def adapters(self) -> list[list[str]]:
        """What each vLLM has loaded."""
        return [self.process(number).adapters for number in (0, 1)]

    def step(self, name: str = "a") -> tuple[str, Path]:
        """The adapter and the folder of a model's step."""
        model = self.registry.get("p", name)
        return model.adapter_name(model.step), model.folder.checkpoint_dir(model.step)

    def add_job(self, name: str) -> str:
        payload = Payload.make(Batch(groups=[]))
        return self.queue.insert(
            self.registry.get("p", name).number, None, "digest", TrainConfig(), payload, JobReport(num_rows=0)
        ).job_id

    async def ask(self, name: str, key: bytes = b"key") -> tuple[str, str]:
        """Sends one request until it is answered, as the proxy does; returns the adapter that answered and its replica."""
        while True:
            try:
                with contextlib.ExitStack() as stack:
                    await self.gate.wait_open(SECONDS)
                    adapter, folder = self.step(name)
                    stack.enter_context(self.gate.inside(adapter))
                    replica = await self.fleet.reach(adapter, folder, lambda: key, SECONDS, stack)
                    assert adapter in self.worlds[self.replicas.index(replica)].process.adapters  # type: ignore[union-attr]
                    async with replica.http.post("/v1/completions", json={"model": adapter}) as response:
                        if response.status == 200:
                            return (await response.json())["model"], replica.name
            except (aiohttp.ClientError, Unavailable):
                await asyncio.sleep(0.01)

    async def keep_asking(self, name: str, key: bytes, until: asyncio.Event) -> int:
        answered = 0
        while not until.is_set():
            await self.ask(name, key)
            answered += 1
            await asyncio.sleep(0.002)
        return answered


@contextlib.asynccontextmanager
async def running(folder: Path, *happens: dict[str, list[str]]) -> AsyncIterator[House]:
    """Two replicas, to which something happens."""
    planned = [*happens, {}, {}][:2]
    clock = FakeClock()
    house = House((make_world(planned[0], clock), make_world(planned[1], clock)), folder)
    house.start()
    try:
        async with asyncio.timeout(SECONDS):
            yield house
    finally:
        await house.stop()
    assert all(world.device.wrongs == [] for world in house.worlds)


@contextlib.contextmanager
def held(world: World, phase: str) -> Iterator[asyncio.Event]:
    """From its next begin on the phase lasts until the block ends; the event says that it has begun."""
    begun, go_on, reach = asyncio.Event(), asyncio.Event(), world.reach

    async def wait(at: str) -> str:
        if at == phase:
            begun.set()
            await go_on.wait()
        return await reach(at)

    world.reach = wait  # type: ignore[method-assign]
    try:
        yield begun
    finally:
        world.reach = reach  # type: ignore[method-assign]
        go_on.set()


@pytest.mark.parametrize(("flag", "requested"), [(None, None), (100, None), (None, 100), (100, 200)])
def test_a_fleet_without_replicas_has_a_length(tmp_path: Path, flag: int | None, requested: int | None) -> None:
    """Train calls are checked with it before a machine has joined."""
    config = ServerConfig(path=tmp_path, max_seq_length=flag)
    fleet = Fleet(replicas=[], progress=StartProgress(), changed=asyncio.Condition(), config=config)
    assert fleet.max_seq_length is None
    base = BaseModel("base", TINY_DIR)
    fleet.start(base, {} if requested is None else {"max_seq_length": str(requested)})
    assert fleet.max_seq_length == (flag or requested or base.facts.max_positions) > 0


async def test_a_step_is_loaded_by_every_replica_and_once(tmp_path: Path) -> None:
    async with running(tmp_path) as house:
        await house.all_ready()
        for _ in range(2):
            await house.fleet.load_adapter(*house.step(), SECONDS)
        assert house.adapters() == [["p/a@0"], ["p/a@0"]] and house.fleet.loaded_adapters() == ["p/a@0"]
        assert [world.seen.count("adapter loads") for world in house.worlds] == [1, 1]
        house.fleet.unload_adapter("p/a@0")
        await house.fleet.load_adapter(*house.step("b"), SECONDS)
        assert house.adapters() == [["p/b@0"], ["p/b@0"]], "unloaded before the next load"


@pytest.mark.parametrize("kind", ["refused", "differs", "refused while the other starts"])
async def test_what_one_replica_refuses_serves_from_none(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as house:
        await house.all_ready()
        name, folder = house.step()
        await house.fleet.load_adapter(*house.step("b"), SECONDS)

        async def refuse(*_: Any) -> None:
            raise PolicyDiffers(name, "its log-probabilities differ") if kind == "differs" else AdapterRefused("no")

        method = "_compare" if kind == "differs" else "_post_load"
        with monkeypatch.context() as patch, contextlib.ExitStack() as block:
            patch.setattr(house.replicas[1], method, refuse)
            if "starts" in kind:
                await house.replicas[0].load_paused(name, folder)
                begun = block.enter_context(held(house.worlds[0], "engine starts"))
                house.process(0).kill()
                await begun.wait()
            with pytest.raises(PolicyDiffers if kind == "differs" else AdapterRefused):
                await house.fleet.load_adapter(name, folder, SECONDS)
            block.close()
            await house.all_ready()
            assert not any(replica.holds(name) for replica in house.replicas)
            if "starts" not in kind:
                assert house.adapters() == [["p/b@0"], ["p/b@0"]], "vLLM has unloaded it, too"
        assert (await house.ask("b"))[0] == "p/b@0", "what served before still does"
        await house.fleet.load_adapter(name, folder, SECONDS)
        assert all(replica.holds(name) for replica in house.replicas), "once both take it"


async def test_a_refusal_takes_nothing_from_those_that_serve_the_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that is back may refuse what it took before: its file was damaged."""
    async with running(tmp_path) as house:
        await house.all_ready()
        name, folder = house.step()
        await house.fleet.load_adapter(name, folder, SECONDS)

        async def refuse(*_: Any) -> None:
            raise AdapterRefused("no")

        monkeypatch.setattr(house.replicas[1], "_post_load", refuse)
        house.process(1).kill()
        await until(lambda: house.replicas[1].num_starts == 2)
        await house.all_ready()
        with refused(AdapterRefused, "adapter_refused"):
            await house.fleet.load_adapter(name, folder, SECONDS)
        assert [replica.holds(name) for replica in house.replicas] == [True, False]
        answers = [await house.ask("a", bytes([key])) for key in range(8)]
        assert set(answers) == {(name, "engine-0")}, "whatever their keys"


async def test_a_replica_that_dies_while_it_loads_has_the_adapter_before_it_is_ready(tmp_path: Path) -> None:
    async with running(tmp_path, {}, {"adapter loads": ["kill engine"]}) as house:
        await house.all_ready()
        await house.fleet.load_adapter(*house.step(), SECONDS)
        assert house.replicas[0].holds("p/a@0")
        await house.all_ready()
        assert house.replicas[1].holds("p/a@0") and house.replicas[1].num_starts == 2


@pytest.mark.parametrize("phase", ["engine loads", "adapter loads"])
async def test_a_replica_that_starts_meanwhile_is_not_ready_without_the_step(phase: str, tmp_path: Path) -> None:
    """It is loading its weights, or the adapters that it knows."""
    async with running(tmp_path) as house:
        await house.all_ready()
        await house.fleet.load_adapter(*house.step("b"), SECONDS)
        with held(house.worlds[1], phase) as begun:
            house.process(1).kill()
            await begun.wait()
            assert house.fleet.state == "ready" and house.replicas[1].state == "starting"
            await house.fleet.load_adapter(*house.step(), SECONDS)
            assert house.replicas[0].holds("p/a@0") and not house.replicas[1].holds("p/a@0")
        await until(lambda: house.replicas[1].state == "ready")
        assert house.replicas[1].holds("p/a@0") and house.replicas[1].holds("p/b@0")


async def test_a_replica_that_does_not_answer_is_killed_and_the_step_serves(tmp_path: Path) -> None:
    async with running(tmp_path) as house:
        await house.all_ready()
        world, reach = house.worlds[1], house.worlds[1].reach

        async def hang(phase: str) -> str:
            if phase == "adapter loads":
                world.reach = reach  # type: ignore[method-assign]
                await until(lambda: house.replicas[0].holds("p/a@0"))
                house.clock.advance(LOAD_SECONDS)
                await asyncio.Event().wait()
            return await reach(phase)

        world.reach = hang  # type: ignore[method-assign]
        await house.fleet.load_adapter(*house.step(), SECONDS)
        assert house.replicas[0].holds("p/a@0")
        await house.all_ready()
        assert house.replicas[1].num_starts == 2 and house.replicas[1].holds("p/a@0")


@pytest.mark.parametrize("comes", ["a step", "a request"])
async def test_a_replica_whose_machine_is_full_says_so_and_serves_once_there_is_room(
    comes: str, tmp_path: Path
) -> None:
    async with running(tmp_path) as house:
        await house.all_ready()
        full, location = house.replicas[1], house.location(1)
        location.is_full = True
        with held(house.worlds[1], "engine starts") as begun:
            if comes == "a step":
                await house.fleet.load_adapter(*house.step(), SECONDS)
            else:
                assert {(await house.ask("a", bytes([key])))[1] for key in range(20)} == {"engine-0"}
            await begun.wait()
            reason = "an adapter's files cannot be delivered (host h: No space left on device)"
            assert full.detail == f"It is being restarted because {reason}."
        tries = location.num_deliveries
        await until(lambda: location.num_deliveries > tries + MAX_FAILED_STARTS or full.state == "failed")
        assert (full.state, full.num_starts) == ("starting", 2)
        assert full.detail == f"It waits because {reason}; they are sent again every 10 s."
        assert await house.ask("a") == ("p/a@0", "engine-0")
        location.is_full = False
        await house.all_ready()
        assert full.holds("p/a@0") and full.num_starts == 2


@pytest.mark.parametrize("outcome", ["refused", "unloaded"])
async def test_what_could_not_be_delivered_once_is_not_said_of_a_later_load(outcome: str, tmp_path: Path) -> None:
    async with running(tmp_path) as house:
        await house.all_ready()
        replica, location = house.replicas[0], house.location(0)
        name, folder = house.step()
        location.is_full = True
        with pytest.raises(NotDelivered):
            await replica.try_load(name, folder)
        location.is_full = False
        if outcome == "refused":
            config = folder / "adapter_config.json"
            config.rename(folder / "aside")
            with refused(AdapterRefused, "adapter_refused"):
                await replica.try_load(name, folder)
            (folder / "aside").rename(config)
        else:
            replica.unload_adapter(name)
        with held(house.worlds[0], "adapter loads") as begun:
            load = asyncio.create_task(replica.try_load(name, folder))
            await begun.wait()
            assert replica.load_waited_for(name) is None
        await load


async def test_an_error_of_a_dying_replica_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path) as house:
        await house.all_ready()

        async def die(*_: Any) -> None:
            monkeypatch.undo()  # the next process lives
            house.process(1).kill()
            await house.process(1).wait()
            raise AdapterRefused("EngineCore encountered an issue")

        monkeypatch.setattr(house.replicas[1], "_post_load", die)
        await house.fleet.load_adapter(*house.step(), SECONDS)
        await house.all_ready()
        assert all(replica.holds("p/a@0") for replica in house.replicas)


async def test_an_adapter_that_no_step_brought_is_loaded_where_its_requests_go(tmp_path: Path) -> None:
    async with running(tmp_path) as house:
        await house.all_ready()
        _, first = await house.ask("a", b"one")
        number = int(first[-1])
        assert house.adapters()[number] == ["p/a@0"] and house.adapters()[1 - number] == []
        assert {(await house.ask("a", b"one"))[1] for _ in range(5)} == {first}
        used = {(await house.ask("a", bytes([key])))[1] for key in range(20)}
        assert used == {"engine-0", "engine-1"}
        assert house.adapters() == [["p/a@0"], ["p/a@0"]]


async def test_the_requests_of_a_lost_replica_go_to_the_other(tmp_path: Path) -> None:
    async with running(tmp_path) as house:
        await house.all_ready()
        await house.fleet.load_adapter(*house.step(), SECONDS)
        _, first = await house.ask("a")
        with held(house.worlds[int(first[-1])], "engine starts"):
            house.process(int(first[-1])).kill()
            _, second = await house.ask("a")
            assert second != first
        await house.all_ready()
        assert (await house.ask("a"))[1] == second, "where its prompt is"
        assert all(replica.num_requests == 0 for replica in house.replicas)


async def test_a_replica_that_is_removed_is_used_for_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by calls that began before, while its last files are deleted."""
    async with running(tmp_path) as house:
        await house.all_ready()
        replica, begun, go_on = house.replicas[1], asyncio.Event(), asyncio.Event()

        async def delete(folders: object) -> None:
            if folders == ():
                begun.set()
                await go_on.wait()

        monkeypatch.setattr(replica.location, "keep_only", delete)
        removal = asyncio.create_task(house.fleet.remove(replica))
        await begun.wait()
        await replica.pause()
        assert not await replica.is_alive() and await replica.metrics() == b""
        assert (await house.ask("a"))[1] == "engine-0"
        go_on.set()
        await removal


async def test_requests_wait_while_every_replica_starts(tmp_path: Path) -> None:
    async with running(tmp_path) as house:
        await house.all_ready()
        with contextlib.ExitStack() as block:
            begun = [block.enter_context(held(world, "engine starts")) for world in house.worlds]
            for number in (0, 1):
                house.process(number).kill()
                await begun[number].wait()
            assert house.fleet.state == "starting" and "starting" in (house.fleet.start_waited_for or "")
            with refused(Unavailable, "engine_not_ready"):
                await house.fleet.wait_ready(0.0)
        assert (await house.ask("a"))[0] == "p/a@0"


async def test_one_replica_that_cannot_start_leaves_the_other(tmp_path: Path) -> None:
    async with running(tmp_path, {}, {"engine starts": ["kill engine"] * MAX_FAILED_STARTS}) as house:
        await until(lambda: house.replicas[1].state == "failed" and house.replicas[0].state == "ready")
        assert house.fleet.state == "ready" and house.fleet.detail is None
        assert await house.ask("a") == ("p/a@0", "engine-0")
        house.replicas[0].state = "failed"
        assert house.fleet.state == "failed" and "engine-1: " in (house.fleet.detail or "")
        with refused(Unavailable, "engine_failed"):
            await house.fleet.wait_ready(SECONDS)
        house.replicas[0].state = "ready"


async def test_a_conversation_is_rendered_by_whoever_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path) as house:
        await house.all_ready()

        async def lose(_: object) -> list[int]:
            house.process(0).kill()
            raise EngineDied("the engine ended while it rendered a conversation")

        async def render(_: object) -> list[int]:
            return [5, 6]

        monkeypatch.setattr(house.replicas[0], "tokenize", lose)
        monkeypatch.setattr(house.replicas[1], "tokenize", render)
        assert await house.fleet.tokenize({"prompt": "a"}) == [5, 6]


async def test_all_pause_while_a_step_trains_and_all_wake_with_it(tmp_path: Path) -> None:
    async with running(tmp_path) as house:
        await house.all_ready()
        await house.ask("a")
        with held(house.worlds[0], "backward") as begun:
            job = house.add_job("a")
            house.runner._wake()
            await begun.wait()
            assert [house.process(number).is_paused for number in (0, 1)] == [True, True]
        await until(lambda: house.queue.get(job).state == "done")
        assert [house.process(number).is_paused for number in (0, 1)] == [False, False]
        assert all(replica.holds("p/a@1") for replica in house.replicas)
        assert (await house.ask("a"))[0] == "p/a@1"


async def test_requests_are_answered_while_a_step_waits_for_a_replica_that_starts(tmp_path: Path) -> None:
    """On a shared device no engine may start beside the trainer."""
    async with running(tmp_path) as house:
        await house.all_ready()
        with held(house.worlds[1], "engine loads") as begun:
            house.process(1).kill()
            await begun.wait()
            job = house.add_job("a")
            house.runner._wake()
            await until(lambda: house.owner.is_held)
            assert house.gate.model is None and await house.ask("b") == ("p/b@0", "engine-0")
        await until(lambda: house.queue.get(job).state == "done")
        assert (await house.ask("a"))[0] == "p/a@1"


PHASES = ("engine starts", "engine loads", "adapter loads", "sleep", "wake_up")


@st.composite
def troubles(draw: st.DrawFn) -> dict[str, list[str]]:
    """What happens to one replica: it dies at most twice while it starts."""
    happens: dict[str, list[str]] = {}
    for phase in draw(st.lists(st.sampled_from(PHASES), max_size=3, unique=True)):
        events = ("", "slow", "kill engine", *(("refuse",) if phase in ("sleep", "wake_up") else ()))
        most = 1 if phase.startswith("engine") or phase == "adapter loads" else 2
        happens[phase] = draw(st.lists(st.sampled_from(events), min_size=1, max_size=most))
    return happens


async def play(folder: Path, happens: tuple[dict[str, list[str]], dict[str, list[str]]]) -> None:
    """Jobs of two models while both get requests."""
    async with running(folder, *({key: list(value) for key, value in events.items()} for events in happens)) as house:
        over = asyncio.Event()
        keys = itertools.count()
        askers = [asyncio.create_task(house.keep_asking(name, bytes([next(keys)]), over)) for name in MODELS * 3]
        jobs = [house.add_job(MODELS[index % 2]) for index in range(3)]
        house.runner._wake()
        await until(lambda: all(house.queue.get(job).state in ("done", "failed") for job in jobs))
        over.set()
        assert all(await asyncio.gather(*askers))
        assert [house.queue.get(job).state for job in jobs] == ["done"] * 3
        await house.all_ready()
        for name, step in (("a", 2), ("b", 1)):
            assert (await house.ask(name))[0] == f"p/{name}@{step}"
            assert all(replica.holds(f"p/{name}@{step}") for replica in house.replicas)
        assert all(replica.num_requests == 0 for replica in house.replicas)


@settings(
    max_examples=10,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(first=troubles(), second=troubles())
def test_all_orders(
    first: dict[str, list[str]], second: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    asyncio.run(play(tmp_path_factory.mktemp("story"), (first, second)))
