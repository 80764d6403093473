"""A machine whose disk is full, that is lost, or that leaves while it joins (`machines.py`)."""

import asyncio
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path

import pytest

import art
from art_protocol.log_file import LogFile
from art_server.engine.engine import DELIVERY_PAUSE_SECONDS
from art_server.machines import hosts as hosts_module
from art_server.machines.joined import JoinedHost
from art_server.machines.obeying import Machinery
from art_server.machines.on_host import OnHost
from art_server.machines.orders import End, Order, OrderReply, Output, StartRank
from art_server.shared.trainer_messages import WorkerConfig
from tests.quick.machines.machines import house
from tests.quick.server.served import sample_group
from tests.waiting import until

pytestmark = pytest.mark.anyio


async def test_an_only_engine_whose_machine_is_full_waits_and_says_for_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deliveries: list[float] = []
    put = JoinedHost.put

    async def counted(host: JoinedHost, folder: Path, names: Collection[str]) -> tuple[str, str]:
        if host.name == "full":
            deliveries.append(here.clock.monotonic())
        return await put(host, folder, names)

    monkeypatch.setattr(JoinedHost, "put", counted)
    async with house(tmp_path, monkeypatch) as here:
        here.host("full", engines=1)
        here.host("trains", ranks=1)
        await here.ready(1)
        await here.joined(1)
        model, backend = art.TrainableModel(name="m", project="p", base_model="art/tiny"), here.backend
        await model.register(backend)
        folders = tmp_path / "full" / "folders"

        def waits_for() -> str:
            return here.server.status.health().waits_for or ""

        async with backend:
            folders.write_text("where no folder can be made")
            waiting = [asyncio.create_task(sample_group(model)) for _ in range(3)]
            await until(lambda: len(deliveries) > 3)
            pauses = [later - earlier for earlier, later in pairwise(deliveries)]
            assert min(pauses) >= DELIVERY_PAUSE_SECONDS, "all requests wait together"
            await until(lambda: "the files of 'p/m@0', which cannot be delivered (host full: " in waits_for())
            folders.unlink()
            groups = await asyncio.gather(*waiting)
            assert waits_for() == ""
            folders.rename(tmp_path / "aside")
            folders.write_text("where no folder can be made")
            job = await model.submit(groups, art.TrainConfig(learning_rate=1e-3))

            def job_waits_for() -> str:
                row = here.server.queue.get(job.job_id)
                return here.server.runner._waits_for(row, (), None) or ""

            await until(lambda: "the files of 'p/m@1'" in job_waits_for())
            folders.unlink()
            (tmp_path / "aside").rename(folders)
            assert (await job).step == 1
        lines = [record.getMessage() for record in caplog.records if "cannot be delivered" in record.getMessage()]
        assert [line.partition(" cannot")[0] for line in lines] == [
            f"engine-full-0: the files of 'p/m@{step}'" for step in (0, 1)
        ]


async def test_a_lost_machine_has_no_engine_and_no_rank_before_its_connection_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To close the connection of a machine that does not answer takes as long as the network's limits."""
    async with house(tmp_path, monkeypatch) as here:
        here.host("one", engines=2, ranks=1)
        await here.ready(2)
        first, second = here.server.fleet.replicas
        assert isinstance(first.location, OnHost)
        host, may_close = first.location.host, asyncio.Event()
        close, stop = host._connection.close, first.stop

        async def close_later() -> None:
            await may_close.wait()
            await close()

        async def stop_later() -> None:
            await may_close.wait()
            await stop()

        monkeypatch.setattr(host._connection, "close", close_later)
        monkeypatch.setattr(first, "stop", stop_later)
        host.lose("it did not obey an order")
        await until(lambda: not here.server.fleet.replicas and not here.server.trainer.joined)
        await until(lambda: second.state == "none")
        may_close.set()
        await here.ready(2)


async def test_a_machine_that_leaves_before_it_is_admitted_leaves_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house(tmp_path, monkeypatch) as here:
        is_asked, may_answer = asyncio.Event(), asyncio.Event()

        async def find_none(*_: object) -> None:
            is_asked.set()
            await may_answer.wait()

        with monkeypatch.context() as patch:
            patch.setattr(hosts_module.Hosts, "_find_fault", find_none)
            here.host("one", engines=1)
            await is_asked.wait()
            await here.end("one")
            may_answer.set()
        here.host("one", engines=1)
        await here.ready(1)


async def test_a_rank_whose_start_is_given_up_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the host has begun to start the process."""
    begun, may_start, is_asked_to_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
    machineries: list[Machinery] = []
    start_rank, begin = Machinery._start_rank, Machinery.begin

    async def start_later(machinery: Machinery, order: StartRank) -> OrderReply:
        machineries.append(machinery)
        begun.set()
        await may_start.wait()
        return await start_rank(machinery, order)

    def note_end(machinery: Machinery, order: Order, tasks: asyncio.TaskGroup) -> None:
        begin(machinery, order, tasks)
        if isinstance(order, End):
            is_asked_to_end.set()

    monkeypatch.setattr(Machinery, "_start_rank", start_later)
    monkeypatch.setattr(Machinery, "begin", note_end)
    async with house(tmp_path, monkeypatch) as here:
        here.host("one", ranks=1)
        await here.joined(1)
        (rank,) = here.server.trainer.joined
        assert isinstance(rank.location, OnHost)
        host = rank.location.host
        rank.use(WorkerConfig(base_model="art/tiny"))
        starting = asyncio.create_task(rank.start())
        await begun.wait()
        starting.cancel()
        ended = asyncio.create_task(is_asked_to_end.wait())
        await asyncio.wait({starting, ended}, return_when=asyncio.FIRST_COMPLETED)
        may_start.set()
        await asyncio.wait({starting})
        ended.cancel()
        assert is_asked_to_end.is_set() and host.processes == {}
        assert [machinery._children for machinery in machineries] == [{}]


async def test_what_a_lost_machine_still_says_is_not_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is lost because it did not obey an order still speaks, until its connection is closed."""
    async with house(tmp_path, monkeypatch) as here:
        here.host("one", ranks=1)
        await here.joined(1)
        (rank,) = here.server.trainer.joined
        assert isinstance(rank.location, OnHost)
        host = rank.location.host
        process = host.new_process(LogFile(tmp_path / "rank.log"))
        host.lose("it did not obey an order")
        host._take(Output(child=process.name, text="late\n", is_log=False))
        assert await process.read_line() == b""
        await until(lambda: rank not in here.server.trainer.joined)
        await here.joined(1)
