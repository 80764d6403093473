"""Facts about devices come from the devices that compute: fake machines join over the real wire and say what they have."""

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.numpy import save_file

import art
from art_server.engine.device.detection import Gpu, Machine
from art_server.errors import InvalidInput
from art_server.machines.on_host import wait_for_removal
from art_server.process.place import Here
from art_server.server import Server, build
from art_server.settings import ServerConfig
from art_server.shared.same_policy import mismatch_limits
from art_server.shared.trainer_messages import MismatchLimits
from art_server.store.base_models import TINY_DIR
from tests.fakes.parts import FakeTrainer
from tests.makers.new_models import add_model
from tests.makers.toy_models import published_file
from tests.quick.machines.fake_host import FakeHost
from tests.quick.machines.machines import KEYS, listening
from tests.quick.server.served import sample_group
from tests.refusals import refused
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("in_process")]

GPUS = tuple(Gpu(index, f"GPU-{index}", "NVIDIA L4", 24 << 30, (8, 9)) for index in range(2))
BFLOAT16 = mismatch_limits(("bfloat16", "bfloat16"))
FLOAT32 = mismatch_limits(("float32", "float32"))
USER = {"authorization": "Bearer user"}
GPU_ARGUMENT = {"gpu_memory_utilization": 0.5}


class Trainer(FakeTrainer):
    def set_base(self, path: Path, plan: object) -> None: ...


async def start_for_ever(*_: object) -> None:
    """What a vLLM does that never answers."""
    await wait_for_removal()


def new_trainer(**_: object) -> Any:
    return Trainer()


@pytest.fixture
def joins(tmp_path: Path) -> Any:
    """A fake machine that joins."""

    @contextlib.asynccontextmanager
    async def joined(url: str, name: str, device: Any, **offered: Any) -> AsyncIterator[FakeHost]:
        folder = tmp_path / f"of-{name}"
        folder.mkdir()
        async with FakeHost(name, device, folder, **offered).joined(url, "joins") as host:
            yield host

    return joined


async def until_offered(server: Server, num_engines: int) -> None:
    await until(lambda: len(server.fleet.replicas) == num_engines)


def bases(folder: Path) -> dict[str, Path]:
    """Base models that a CPU does not serve, or not in every number type."""
    tiny = json.loads((TINY_DIR / "config.json").read_text())
    configs = {
        "quantised": tiny | {"quantization_config": {"quant_method": "bitsandbytes"}},
        "mixture": published_file("minimax_m2"),
        "gated delta": published_file("qwen3_5_text"),
    }
    for name, config in configs.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config))
        save_file({}, folder / name / "model.safetensors")
    return {name: folder / name for name in configs}


async def register(client: httpx.AsyncClient, arguments: dict[str, float], base: str = "art/tiny") -> Any:
    body = {"name": "m", "project": "p", "base_model": base, "engine_args": arguments}
    return {"notes": []} | (await client.post("/api/models", json=body, headers=USER)).json()


async def facts(server: Server, url: str, models: dict[str, Path]) -> dict[str, Any]:
    """What a server says of the devices that compute for it."""
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as client:
        answers = {name: (await register(client, {}, str(folder)))["error"] for name, folder in models.items()}
        requested = await register(client, GPU_ARGUMENT | {"record_distributions": True})
        return {
            "limits": server.fleet.mismatch_limits,
            "refusals": {name: (answer["code"], answer["param"]) for name, answer in answers.items()},
            "notes": requested["notes"],
            "length": requested["max_seq_length"],
            "cards": (await client.get("/v1/models", headers=USER)).json()["data"],
        }


@pytest.mark.parametrize(
    "settings",
    [{}, {"exact": True}, {"dtype": "float16", "trainer_dtype": "float32", "max_seq_length": 512}],
    ids=["default", "exact", "float16-short"],
)
async def test_a_server_of_gpu_machines_decides_as_a_server_with_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joins: Any, settings: dict[str, Any]
) -> None:
    models = bases(tmp_path / "bases")
    of_both = {"api_keys": KEYS, "base_model": "art/tiny", **settings}
    server = build(ServerConfig(path=tmp_path / "cpu", engines=0, ranks=0, **of_both), make_trainer=new_trainer)
    async with (
        listening(server) as url,
        joins(url, "one", "cuda", engines=1, ranks=1),
        joins(url, "two", "cuda", engines=1),
    ):
        await until_offered(server, 2)
        joined = await facts(server, url, models)
    monkeypatch.setattr("art_server.server.detect", lambda: Machine("cuda", GPUS, 64 << 30))
    monkeypatch.setattr(Here, "start", start_for_ever)
    server = build(ServerConfig(path=tmp_path / "cuda", **of_both), make_trainer=new_trainer)
    async with listening(server) as url:
        own = await facts(server, url, models)
    assert joined == own
    assert own["refusals"] == dict.fromkeys(models, ("base_model_differs", "base_model")), "none is refused on a GPU"


@pytest.mark.parametrize(
    ("device", "limits", "number_type"), [("cuda", BFLOAT16, "bfloat16"), ("cpu", FLOAT32, "float32")]
)
async def test_a_job_is_judged_by_the_devices_that_compute_it(
    tmp_path: Path, joins: Any, device: str, limits: MismatchLimits, number_type: str
) -> None:
    server = build(ServerConfig(path=tmp_path / "server", engines=0, ranks=0, api_keys=KEYS, base_model="art/tiny"))
    add_model(server.registry, "m", "art/tiny")
    async with listening(server) as url, joins(url, "one", device, engines=1, ranks=1, serves=True) as host:
        host.vllm.take_samples = server.ledger.take_samples
        model = art.TrainableModel(name="m", project="p", base_model="art/tiny")
        async with art.Backend(url, api_key="user") as backend:
            await model.register(backend)
            with pytest.raises(art.ArtJobError, match="the test ends the job"):
                await model.train([await sample_group(model)], art.TrainConfig(learning_rate=1e-3))
        layers, job = host.tasks
    assert [MismatchLimits.model_validate(task["mismatch_limits"]) for task in (layers, job)] == [limits, limits]
    assert host.number_types() == [number_type]


@pytest.mark.parametrize(("model", "reason"), [("quantised", "which needs a GPU"), ("mixture", "not served on a CPU")])
async def test_a_machine_that_cannot_compute_the_base_model_is_sent_away(
    tmp_path: Path, joins: Any, model: str, reason: str
) -> None:
    """Whether it joins before the model is loaded or after. While no machine is there, the model is taken."""
    folder = bases(tmp_path / "bases")[model]
    server = build(ServerConfig(path=tmp_path / "server", engines=0, ranks=0, api_keys=KEYS), make_trainer=new_trainer)
    async with listening(server) as url, joins(url, "gpu", "cuda", engines=1):
        async with joins(url, "early", "cpu", engines=1) as early, httpx.AsyncClient(base_url=url) as client:
            await until_offered(server, 2)
            assert (await register(client, {}, str(folder)))["base_model"] == str(folder)
            await until(lambda: early.refusal is not None)
            assert reason in str(early.refusal)
        async with joins(url, "late", "cpu", engines=1) as late:
            await until(lambda: late.refusal is not None)
            assert reason in str(late.refusal)
        assert [replica.name for replica in server.fleet.replicas] == ["engine-gpu-0"]


async def test_a_machine_whose_card_lacks_the_number_type_is_refused(tmp_path: Path, joins: Any) -> None:
    old = {"engines": 1, "without_bfloat16": "Tesla T4"}
    config = ServerConfig(path=tmp_path / "server", engines=0, ranks=0, api_keys=KEYS)
    server = build(config, make_trainer=new_trainer)
    async with listening(server) as url, joins(url, "one", "cuda", **old) as host:
        assert host.refusal == "Tesla T4 has no bfloat16: start the server with --dtype float16 --trainer-dtype float32"
    float16 = config.model_copy(update={"dtype": "float16", "trainer_dtype": "float32"})
    async with listening(build(float16, make_trainer=new_trainer)) as url, joins(url, "two", "cuda", **old) as host:
        assert host.refusal is None


async def test_a_model_that_no_machine_can_compute_is_refused(tmp_path: Path, joins: Any) -> None:
    models = bases(tmp_path / "bases")
    config = ServerConfig(path=tmp_path / "server", engines=0, ranks=0, api_keys=KEYS, exact=True)
    server = build(config, make_trainer=new_trainer)
    async with listening(server) as url, joins(url, "one", "cpu", engines=1), httpx.AsyncClient(base_url=url) as client:
        await until_offered(server, 1)
        for folder in models.values():
            assert (await register(client, {}, str(folder)))["error"]["code"] == "not_trainable"


async def test_a_machine_offers_its_devices_when_it_has_the_base_model(tmp_path: Path, joins: Any) -> None:
    config = ServerConfig(path=tmp_path / "server", engines=0, ranks=0, api_keys=KEYS, base_model="art/tiny")
    server = build(config, make_trainer=new_trainer)
    async with listening(server) as url, joins(url, "one", "cuda", engines=1, ranks=1, has_base=False) as host:
        await until(lambda: len(host.orders) == 1)
        assert server.trainer.joined == []
        assert server.devices.engines == server.devices.ranks == set()


async def test_an_argument_for_gpus_reaches_the_machines_that_have_them(tmp_path: Path, joins: Any) -> None:
    server = build(ServerConfig(path=tmp_path / "server", engines=0, ranks=0, api_keys=KEYS), make_trainer=new_trainer)
    async with listening(server) as url, httpx.AsyncClient(base_url=url) as client:
        assert (await register(client, GPU_ARGUMENT))["notes"] == [], "the machines may have GPUs"
        async with joins(url, "gpu", "cuda", engines=1) as gpu, joins(url, "cpu", "cpu", engines=1) as cpu:
            await until(lambda: bool(gpu.settings() and cpu.settings()))
            assert gpu.settings()[0]["engine_args"] == {"gpu_memory_utilization": "0.5"}
            assert cpu.settings()[0]["engine_args"] == {}, "vLLM would take the share of main memory"
            assert (await register(client, GPU_ARGUMENT))["notes"] == []
            (note,) = (await register(client, {"gpu_memory_utilization": 0.25}))["notes"]
            assert note.startswith("gpu_memory_utilization=0.25 is not applied: the engine was started with 0.5")
        await until_offered(server, 0)
        (note,) = (await register(client, {"gpu_memory_utilization": 0.25}))["notes"]
        assert note.startswith("gpu_memory_utilization=0.25 is not applied: the engine was started with 0.5")
        async with joins(url, "alone", "cpu", engines=1):
            await until_offered(server, 1)
            notes = (await register(client, GPU_ARGUMENT))["notes"]
            assert notes == ["engine_args.gpu_memory_utilization has no effect here"]


async def test_what_an_engine_computes_otherwise_on_its_device_is_said_where_it_starts(
    tmp_path: Path, joins: Any
) -> None:
    folder = bases(tmp_path / "bases")["gated delta"]
    config = ServerConfig(path=tmp_path / "server", engines=0, ranks=0, api_keys=KEYS, base_model=str(folder))
    server = build(config, make_trainer=new_trainer)

    def notes() -> list[str]:
        return [line.text for line in server.fleet.progress.lines if "gated delta layers" in line.text]

    async with listening(server) as url, joins(url, "gpu", "cuda", engines=1), joins(url, "cpu", "cpu", engines=1):
        await until(lambda: len(notes()) > 0)
        await until(lambda: all(replica.state == "starting" for replica in server.fleet.replicas))
        (note,) = notes()
        assert "engine-cpu-0: it computes in bfloat16" in note


def test_a_server_that_computes_nothing_looks_for_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment may be that of the machines: vLLM's CUDA build, on a machine without a GPU."""

    def detect() -> Machine:
        raise InvalidInput("vLLM's CUDA build is installed, but there is no GPU to use", code="no_gpu")

    monkeypatch.setattr("art_server.server.detect", detect)
    config = ServerConfig(path=tmp_path, ranks=0, api_keys=KEYS)
    build(config.model_copy(update={"engines": 0})).close()
    with refused(InvalidInput, "no_gpu"):
        build(config)
