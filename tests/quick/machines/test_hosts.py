"""Hosts join, serve, train and are lost: real connections, files and processes, a fake vLLM (`machines.py`)."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import art
from art_server.cli import UVICORN
from art_server.engine import engine as engine_module
from art_server.engine.device.detection import detect
from art_server.engine.engine import HANG_SECONDS, AdapterRefused, Engine, NotDelivered
from art_server.jobs import trainer_process as trainer_process_module
from art_server.jobs.gang import IDLE_SECONDS, LAST_SECONDS
from art_server.jobs.trainer_process import TrainerDied
from art_server.machines import host as host_module
from art_server.machines import hosts as hosts_module
from art_server.machines import joined as joined_module
from art_server.machines import obeying as obeying_module
from art_server.machines import orders
from art_server.machines.host import NAME_SECONDS, Host, Refused
from art_server.machines.joined import HostProcess
from art_server.machines.obeying import HostOffer
from art_server.machines.on_host import OnHost
from art_server.machines.orders import SILENCE_SECONDS
from art_server.process.children import Children
from art_server.shared.main_memory import main_memory
from art_server.shared.trainer_messages import WorkerConfig
from art_server.store.base_models import TINY_DIR
from art_server.trainer.token_budget import budget_key
from tests.fakes.clock import FakeClock
from tests.quick.machines.machines import House, house, house_with_an_engine
from tests.quick.server.served import sample_group
from tests.waiting import until

pytestmark = pytest.mark.anyio

CONFIG = art.TrainConfig(learning_rate=1e-3)


async def register(here: House) -> tuple[art.TrainableModel, art.Backend]:
    model = art.TrainableModel(name="m", project="p", base_model="art/tiny")
    backend = here.backend
    await model.register(backend)
    return model, backend


def learned(tokens: int) -> str:
    """The file of budgets in which batches of all lengths have so many tokens."""
    lengths = [2**n for n in range(1, 12)]
    return json.dumps({budget_key("CPU", main_memory(), str(TINY_DIR), 8, length): tokens for length in lengths})


async def test_a_program_trains_on_machines_that_have_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was learned of memory is the server's, and goes to all machines: a budget in a machine's own folder would split the plans.
    An engine whose machine cannot take the adapter waits for room, and the step serves from the others."""
    async with house(tmp_path, monkeypatch) as here:
        here.host("full", engines=1)
        await here.ready(1)
        here.host("one", engines=1, ranks=1)
        here.host("two", engines=1, ranks=1)
        await here.ready(3)
        await here.joined(2)
        (tmp_path / "one" / "budgets.json").write_text(learned(32))
        (tmp_path / "server" / ".server" / "budgets.json").write_text(learned(64))
        model, backend = await register(here)
        (tmp_path / "full" / "folders").write_text("where no folder can be made")
        folder = here.server.registry.get("p", "m").folder
        async with backend:
            for step in (1, 2):
                groups = [await sample_group(model) for _ in range(2)]
                assert (await model.train(groups, CONFIG)).step == step
                environment = folder.read_checkpoint(step).environment
                assert (environment["ranks"], environment["max_tokens"]) == ("2", "64")
        names = {file.name for file in folder.checkpoint_dir(2).iterdir()}
        assert {"adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors"} <= names
        replicas = {replica.name: replica for replica in here.server.fleet.replicas}
        for name in ("one", "two"):
            replica = replicas[f"engine-{name}-0"]
            assert "p/m@2" in replica.loaded_adapters()
            copies = [*(tmp_path / name / "folders").iterdir()]
            assert len(copies) <= len(replica.loaded_adapters()) + 1, "a machine keeps the adapters that serve"
        full = replicas["engine-full-0"]
        await until(
            lambda: "It waits because an adapter's files cannot be delivered (host full: " in (full.detail or "")
        )
        assert full.state == "starting" and full.num_starts == 2


async def test_a_lost_machine_costs_nothing_but_its_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with house(tmp_path, monkeypatch) as here:
        here.host("one", engines=1, ranks=1)
        here.host("two", engines=1, ranks=1)
        await here.ready(2)
        model, backend = await register(here)
        async with backend:
            await here.end("one")
            await here.ready(1)
            await here.joined(1)
            step = (await model.train([await sample_group(model)], CONFIG)).step
            group = await sample_group(model)
            await here.end("two")
            await here.ready(0)
            job = await model.submit([group], CONFIG)
            waiting = asyncio.create_task(sample_group(model))
            await until(lambda: here.server.gate.num_inside > 0)
            assert here.server.status.health().engine == "starting", "requests and jobs wait for a machine"
            here.host("three", engines=1, ranks=1)
            await waiting
            assert (await job).step == step + 1
        assert here.server.background.faults == {}


@pytest.mark.parametrize("ranks", [(2,), (1, 1)], ids=["one host", "two hosts"])
async def test_a_stall_of_the_network_is_no_death_of_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, ...]
) -> None:
    """No beat comes for much longer than idle ranks are waited for."""
    async with house(tmp_path, monkeypatch) as here, here.relay() as network:
        here.host("serves", engines=1)
        for number, num_ranks in enumerate(ranks):
            here.host(f"trains-{number}", ranks=num_ranks, through=network)
        await here.ready(1)
        await here.joined(2)
        model, backend = await register(here)
        async with backend:
            groups = [await sample_group(model) for _ in range(2)]
            here.when_training(network.stall)
            job = await model.submit(groups, CONFIG)
            stop = here.clock.now() + 10 * (IDLE_SECONDS + SILENCE_SECONDS)
            await until(lambda: network.num_held > 20 and here.clock.now() > stop)
            network.resume()
            assert (await job).step == 1
        row = here.server.queue.get(job.job_id)
        assert row.attempts == {} and len(here.server.trainer.ranks) == 2


async def test_a_stall_of_the_network_is_no_hang_of_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its work counters do not come through, while a request waits, for longer than an engine may compute nothing."""
    async with house(tmp_path, monkeypatch) as here, here.relay() as network:
        here.host("one", engines=1, through=network)
        await here.ready(1)
        (replica,) = here.server.fleet.replicas
        network.stall()
        with here.server.gate.inside("a request"):
            stop = here.clock.now() + 10 * HANG_SECONDS
            await until(lambda: here.clock.now() > stop or replica.state != "ready")
        network.resume()
        assert replica.state == "ready" and replica.num_starts == 1


@pytest.mark.parametrize("phase", ["while it starts", "while it trains"])
async def test_a_lost_machine_is_no_death_of_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """The attempt is repeated without it, and not counted against the job."""
    async with house(tmp_path, monkeypatch) as here:
        here.host("kept", engines=1, ranks=1)
        here.host("lost", ranks=1)
        await here.ready(1)
        await here.joined(2)
        model, backend = await register(here)
        async with backend:
            groups = [await sample_group(model)]
            if phase == "while it trains":
                here.when_training(lambda: here.tasks["lost"].cancel())
                job = await model.submit(groups, CONFIG)
            else:
                job = await model.submit(groups, CONFIG)
                await until(lambda: any(rank.is_running for rank in here.server.trainer.ranks))
                await here.end("lost")
            await here.joined(1)
            while not here.server.queue.get(job.job_id).attempts:
                here.clock.advance(LAST_SECONDS)  # ends a rank that waits for the lost one
                await asyncio.sleep(0.1)
            assert (await job).step == 1
        assert set(here.server.queue.get(job.job_id).attempts) == {"connection_lost"}
        assert here.server.trainer.num_ranks == 1


def pid_of(replica: Engine) -> int:
    """The id of an engine's process on its host, which is in this process."""
    process = replica._process
    assert isinstance(process, HostProcess) and replica.pid is None
    return process.host_pid


def folders_of(machine: Path) -> list[list[str]]:
    """The files of each folder that a host keeps."""
    kept = machine / "folders"
    return [sorted(file.name for file in folder.iterdir()) for folder in kept.iterdir()] if kept.exists() else []


async def test_an_engine_that_dies_is_started_again_with_one_copy_of_its_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine gets only the files of a checkpoint that an engine reads."""
    async with house_with_an_engine(tmp_path, monkeypatch) as here:
        model, backend = await register(here)
        await sample_group(model)
        folder = here.server.registry.get("p", "m").folder.checkpoint_dir(0)
        (folder / "optimizer.safetensors").write_bytes(b"comes and goes")
        (folder / "tokens.safetensors").write_bytes(b"comes and goes")
        (replica,) = here.server.fleet.replicas

        async def start_again() -> None:
            num_starts = replica.num_starts
            os.kill(pid_of(replica), signal.SIGKILL)
            await until(lambda: replica.num_starts > num_starts and replica.state == "ready")

        for _ in range(2):
            await start_again()
            assert replica.was_killed and replica.loaded_adapters() == ["p/m@0"]
            files = ["adapter_config.json", "adapter_model.safetensors", "checkpoint.json"]
            assert folders_of(tmp_path / "one") == [files]
        async with backend:
            await sample_group(model)
        replica.unload_adapter("p/m@0")
        await start_again()
        assert folders_of(tmp_path / "one") == [], "it was to be unloaded when vLLM died"


async def test_an_adapter_that_cannot_be_loaded_costs_no_engine_and_is_not_kept_on_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM refuses the first. The second was deleted when the machine fetched it."""
    async with house_with_an_engine(tmp_path, monkeypatch) as here:
        (replica,) = here.server.fleet.replicas
        (tmp_path / "broken").mkdir()
        (tmp_path / "broken" / "adapter_model.safetensors").write_bytes(b"without a configuration")
        with pytest.raises(AdapterRefused, match="vLLM refused"):
            await replica.try_load("p/m@7", tmp_path / "broken")
        with pytest.raises(AdapterRefused, match="was deleted"):
            await replica.try_load("p/m@7", tmp_path / "0007")
        assert folders_of(tmp_path / "one") == []
        assert replica.state == "ready" and replica.num_starts == 1


async def test_a_delivery_that_takes_too_long_costs_the_engine_and_not_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What arrives afterwards is not kept."""
    async with house(tmp_path, monkeypatch) as here, here.relay() as network:
        here.host("slow", engines=1, through=network)
        await here.ready(1)
        _, backend = await register(here)
        await backend.close()
        (replica,) = here.server.fleet.replicas
        assert isinstance(replica.location, OnHost)
        host = replica.location.host
        folder = here.server.registry.get("p", "m").folder.checkpoint_dir(0)
        copies = folders_of(tmp_path / "slow")
        # All of the network stalls, not only the delivery: for less time than that after which the machine is lost.
        monkeypatch.setattr(engine_module, "LOAD_SECONDS", SILENCE_SECONDS / 2)
        network.stall()
        loading = asyncio.create_task(replica.try_load("p/m@0-again", folder))
        await here.clock.end(SILENCE_SECONDS / 2)
        with pytest.raises(NotDelivered, match="they had not arrived"):
            await loading
        network.resume()
        await host.free_port()
        await until(lambda: folders_of(tmp_path / "slow") == copies)
        assert host.reason == "" and replica.num_starts == 1


async def test_the_sockets_of_a_killed_host_are_removed_at_its_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(sockets))
    async with house_with_an_engine(tmp_path, monkeypatch) as here:
        (run_dir,) = [folder for folder in sockets.iterdir() if (folder / "records.sock").exists()]
        await here.end("one")
    assert not run_dir.exists()
    run_dir.mkdir()  # as SIGKILL leaves it
    (tmp_path / "key").write_text("joins")

    async def end_at_once(_: Host) -> None: ...

    monkeypatch.setattr(host_module, "run_until_sigterm", end_at_once)
    monkeypatch.setattr(os, "umask", lambda _: 0)  # the tests go on in this process
    flags = ["--join", here.url, "--token-file", str(tmp_path / "key"), "--path", str(tmp_path / "one")]
    await asyncio.to_thread(host_module.main, flags)
    assert not run_dir.exists()


async def test_a_machine_that_is_silent_is_lost_and_joins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose server is silent ends its children, and joins anew too."""
    async with house_with_an_engine(tmp_path, monkeypatch) as here:

        async def is_lost_and_joins_anew(clock: FakeClock) -> None:
            first = here.server.fleet.replicas[0]
            pid = pid_of(first)
            await clock.end(SILENCE_SECONDS)
            await until(lambda: first not in here.server.fleet.replicas)
            await until(lambda: not Path(f"/proc/{pid}").exists())
            await here.ready(1)
            assert here.server.fleet.replicas[0] is not first

        await is_lost_and_joins_anew(here.clock)
        await is_lost_and_joins_anew(here.hosts_clock)


async def test_a_binary_frame_ends_the_connection_and_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"authorization": "Bearer joins"}
    async with house(tmp_path, monkeypatch) as here, aiohttp.ClientSession(here.url, headers=headers) as session:
        async with session.ws_connect(orders.JOIN) as connection:
            await connection.send_bytes(b"{}")
            refusal = orders.FROM_SERVER.validate_json(await connection.receive_str())
            assert refusal == orders.Refusal(reason="it sent no greeting, but a binary frame")
        async with session.ws_connect(orders.JOIN) as connection:
            greeting = orders.Greeting(
                name="one",
                address="127.0.0.1",
                port=int(here.url.rpartition(":")[2]),
                device="cpu",
                without_bfloat16="",
                engines=0,
                ranks=0,
                versions=host_module.versions(),
            )
            await connection.send_str(greeting.model_dump_json())
            assert orders.FROM_SERVER.validate_json(await connection.receive_str()) == orders.Welcome()
            await connection.send_bytes(b"{}")
            assert {message.type async for message in connection} <= {aiohttp.WSMsgType.TEXT}
        assert "host one is lost: it sent an unknown message: a binary frame" in caplog.messages


async def test_a_text_frame_among_records_ends_their_connection_and_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"authorization": "Bearer joins"}
    async with house_with_an_engine(tmp_path, monkeypatch) as here:
        (engine,) = here.server.fleet.replicas
        assert isinstance(engine.location, OnHost)
        (child,) = engine.location.host.processes
        async with (
            aiohttp.ClientSession(here.url, headers=headers) as session,
            session.ws_connect(f"{orders.RECORDS}/{child}") as connection,
        ):
            await connection.send_str("{}")
            assert [message async for message in connection] == []
        sentence = "host one sent a text frame in place of an engine's records: this connection is closed"
        assert sentence in caplog.messages
        assert not [record for record in caplog.records if record.exc_info]


async def test_sigterm_ends_a_host_as_ctrl_c_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`House.end` has what ends with a host."""
    (tmp_path / "key").write_text("joins")
    async with house(tmp_path, monkeypatch) as here:
        command = [
            sys.executable,
            "-m",
            "art_server",
            "host",
            "--join",
            here.url,
            "--token-file",
            str(tmp_path / "key"),
        ]
        command += ["--name", "one", "--path", str(tmp_path / "one"), "--engines", "0", "--ranks", "1"]
        host = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        try:
            await here.joined(1)
            host.terminate()
            _, printed = await host.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                host.kill()
        assert host.returncode == 0 and b"Traceback" not in printed, printed.decode()
        await here.joined(0)


async def test_a_rank_that_sends_too_long_a_line_is_ended_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (trainer_process_module, obeying_module):
        monkeypatch.setattr(module, "MAX_ANSWER_BYTES", 2**16)
    program = "import time; print('x' * 2**18, flush=True); time.sleep(1000)"
    monkeypatch.setattr(trainer_process_module, "worker_command", lambda _: [sys.executable, "-c", program])
    async with house(tmp_path, monkeypatch) as here:
        here.host("one", ranks=1)
        await here.joined(1)
        (rank,) = here.server.trainer.joined
        rank.use(WorkerConfig(base_model="art/tiny"))
        with pytest.raises(TrainerDied, match="the rank was ended: it sent an answer of more than 65536 bytes"):
            await rank.start()


async def test_files_pass_for_hosts_only_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with house(tmp_path, monkeypatch) as here, httpx.AsyncClient(base_url=here.url) as client:
        user, joins = ({"authorization": f"Bearer {key}"} for key in ("user", "joins"))
        assert (await client.get("/api/hosts/files/00", headers=user)).status_code == 403
        assert (await client.get("/api/hosts/files/00", headers=joins)).status_code == 404
        assert (await client.get("/v1/models", headers=joins)).status_code == 403

        async def put(ticket: str, name: str, digest: str = "") -> Any:
            headers = joins | {"x-art-digest": digest}
            return await client.put(f"/api/hosts/folders/{ticket}/{name}", headers=headers, content=b"x")

        assert (await put("none", "file")).status_code == 404
        hosts = here.server.hosts
        assert isinstance(hosts, hosts_module.Hosts)
        hosts._tickets["good"] = tmp_path / "taken"
        torn = await put("good", "file", "0" * 64)
        assert torn.json()["error"]["code"] == "wrong_digest"
        for name in ("..%2Ffile", "a/b/c", ".hidden", "%2Fetc%2Fpasswd"):
            assert (await put("good", name)).is_client_error, name
        assert [*(tmp_path / "taken").rglob("*")] == []


REFUSED = {
    "name": "a host named 'one' has joined already",
    "version": "torch 2.0.0 here",
    "port": "cannot reach its ports at 127.0.0.1",
    "key": "does not know this key",
    "scope": "lacks the scope 'host'",
    "base": "base model 'art/tiny' has other files on this machine",
    "address": "the server does not answer",
}


@pytest.mark.parametrize("reason", REFUSED)
async def test_a_machine_that_cannot_join_hears_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    async with house(tmp_path, monkeypatch) as here:
        key, own = "joins", host_module.versions()
        match reason:
            case "name":
                here.host("one", engines=1)
                await here.ready(1)
                here.tasks["first"] = here.tasks.pop("one")
            case "version":
                monkeypatch.setattr(host_module, "versions", lambda: own | {"torch": "2.0.0"})
            case "port":
                monkeypatch.setattr(host_module, "listen", lambda address: Closed())
            case "base":
                monkeypatch.setattr(joined_module, "base_digests", lambda path: {"model.safetensors": "0" * 64})
            case "address":
                here.url = "http://127.0.0.1:9"
            case _:
                key = {"key": "other", "scope": "user"}[reason]
        refusing = asyncio.create_task(here.refusal("one", engines=1, key=key))
        if reason == "name":
            await here.clock.end(NAME_SECONDS)
        assert REFUSED[reason] in await refusing
        await here.ready(1 if reason == "name" else 0)


class Closed:
    """A socket that nobody reaches."""

    def getsockname(self) -> tuple[str, int]:
        return ("127.0.0.1", 9)

    def close(self) -> None:
        pass


def test_each_limit_allows_for_a_network_that_stalls() -> None:
    """TCP sends again after pauses that double: after a stall of 15 s it may be silent for 15 s more."""
    assert orders.SILENCE_SECONDS > 2 * orders.STALL_SECONDS + orders.BEAT_SECONDS
    assert UVICORN["ws_ping_timeout"] > orders.SILENCE_SECONDS, "the connection's own limit comes first"
    assert HANG_SECONDS > orders.SILENCE_SECONDS, "a machine is lost before its engine hangs"
    assert min(orders.REPLY_SECONDS, orders.REACH_SECONDS) >= orders.SILENCE_SECONDS
    assert host_module.NAME_SECONDS > orders.SILENCE_SECONDS, "a machine that is back waits for its name"


@contextlib.asynccontextmanager
async def server_that(join: Callable[[web.WebSocketResponse], Awaitable[None]], folder: Path) -> AsyncIterator[Host]:
    """A host whose server answers each greeting as `join` does, and then closes the connection."""

    async def answer(request: web.Request) -> web.WebSocketResponse:
        connection = web.WebSocketResponse()
        await connection.prepare(request)
        await connection.receive_str()
        await join(connection)
        await connection.close()
        return connection

    application = web.Application()
    application.router.add_get(orders.JOIN, answer)
    async with TestServer(application) as server:
        yield Host(
            url=str(server.make_url("")).rstrip("/"),
            token="key",
            offer=HostOffer("one", detect(), ((),), ()),
            folder=folder,
            children=Children(folder, folder / "logs"),
            clock=FakeClock(),
        )


async def test_a_host_whose_server_ends_before_it_welcomes_the_host_joins_again(tmp_path: Path) -> None:
    connections: list[web.WebSocketResponse] = []

    async def join(connection: web.WebSocketResponse) -> None:
        connections.append(connection)
        if len(connections) > 1:
            await connection.send_str(orders.Refusal(reason="tried twice").model_dump_json())

    async with server_that(join, tmp_path) as host:
        with pytest.raises(Refused, match="tried twice"):
            await host.run_forever()
    assert len(connections) == 2


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"{}", "the server sent a binary frame"),
        ('{"kind": "dance"}', "the server sent an unknown message: Input tag 'dance' found using 'kind'"),
        ("{", "the server sent an unknown message: Invalid JSON"),
    ],
)
async def test_what_a_host_cannot_read_ends_the_connection_and_is_the_reason(
    tmp_path: Path, frame: bytes | str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    connections: list[web.WebSocketResponse] = []

    async def join(connection: web.WebSocketResponse) -> None:
        connections.append(connection)
        if len(connections) > 1:
            await connection.send_str(orders.Refusal(reason="that was all").model_dump_json())
            return
        await connection.send_str(orders.Welcome().model_dump_json())
        await (connection.send_str(frame) if isinstance(frame, str) else connection.send_bytes(frame))
        async for _ in connection:  # until the host closes it
            pass

    async with server_that(join, tmp_path) as host:
        with pytest.raises(Refused, match="that was all"):
            await host.run_forever()
    assert [line for line in caplog.messages if reason in line and "joining again" in line]
    assert not [record for record in caplog.records if record.exc_info]
