"""The tensors of an adapter: names and shapes, from the record of its base model, and the check of a folder that a user brings.

No torch and no weights of the base model are needed, so the server does this itself.
"""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from art_protocol.wire import LoRAConfig
from art_server.store.adapter_layers import Layers, UnknownLayers, chosen_layers, renamed
from art_server.store.model_folder import ADAPTER_FILE, OPTIMIZER_FILE

STATE_KEYS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps for a parameter: a number, and two tensors of the parameter's shape."""
NUMBER_TYPES = {"F32": ("<u4", 0x7F80_0000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
"""The number types of adapters, by their names in safetensors: an integer of the same size, and the bits of the exponent, which
are all set in infinities and NaN only."""


class BadCheckpoint(ValueError):
    """The checkpoint does not fit this base and LoRA shape."""


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    dtype: str
    """The number type, as safetensors names it."""
    shape: tuple[int, ...]
    offset: int
    """The tensor's first byte, counted from the file's begin."""


def tensor_shapes(layers: Layers, lora: LoRAConfig) -> dict[str, tuple[int, int]]:
    """The shape of each tensor of an adapter by its name in PEFT's files, in PEFT's order: of each layer first A, then B.

    Raises:
        UnknownLayers: `lora` names something else than layers that take an adapter.
    """
    chosen = chosen_layers(lora.target_modules, layers)
    shapes: dict[str, tuple[int, int]] = {}
    for path, (inputs, outputs) in layers.shapes.items():
        if path in chosen:
            shapes[f"base_model.model.{path}.lora_A.weight"] = lora.rank, inputs
            shapes[f"base_model.model.{path}.lora_B.weight"] = outputs, lora.rank
    return shapes


def check_checkpoint(layers: Layers, lora: LoRAConfig, folder: Path, known: LoRAConfig | None = None) -> LoRAConfig:
    """Checks that a folder's tensors are the tensors of this adapter on a base with these layers, and finite (blocking).
    Returns the configuration, with layers that are listed by path in their shortest form, or as `known` names them.

    Raises:
        BadCheckpoint: the tensors are others, or not finite.
    """
    try:
        shapes = tensor_shapes(layers, lora)
    except UnknownLayers as error:
        raise BadCheckpoint(str(error)) from error
    file = folder / ADAPTER_FILE
    tensors = _read_header(file)
    if different := shapes.keys() ^ tensors.keys():
        verb = "lacks" if min(different) in shapes else "has, unlike the base,"
        raise BadCheckpoint(
            f"target_modules is {_shown(lora.target_modules)}, and {len(different)} tensors differ from those of these layers: "
            f"{ADAPTER_FILE} {verb} {min(different)[:200]}. Let target_modules list the layers that were trained, and nothing "
            "else be saved (modules_to_save, embeddings)"
        )
    _check_tensors(file, tensors, shapes)
    if (folder / OPTIMIZER_FILE).exists():
        file = folder / OPTIMIZER_FILE
        state = _read_header(file)
        _check_tensors(file, state, _state_shapes(state, shapes))
    preferred = [] if known is None else [known.target_modules]
    return lora.model_copy(update={"target_modules": renamed(lora.target_modules, preferred, layers)})


def _shown(targets: list[str] | None) -> str:
    return "all linear layers" if targets is None else ", ".join(targets)[:200]


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by name."""
    try:
        with safe_open(file, "numpy"):
            pass  # opening compares the header with the file's size
        with open(file, "rb") as opened:
            # The format: eight bytes with the header's size, the header, then the tensors. Offsets count from the header's end.
            (size,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(size))
    except (SafetensorError, OSError) as error:
        raise BadCheckpoint(
            f"{file.name} is not a safetensors file ({error}): save the adapter with safe_serialization=True"
        ) from error
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(entry["dtype"], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def _state_shapes(
    state: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of an optimizer's state, for the parameters of which `state` has one."""
    expected: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        parameter = f"{name.removesuffix('.weight')}.default.weight"
        step, *moments = (f"{parameter}.{key}" for key in STATE_KEYS)
        if step in state:
            expected[step] = ()
            expected |= dict.fromkeys(moments, shape)
    return expected


def _check_tensors(file: Path, tensors: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, tensor in tensors.items():
        if name not in shapes:
            raise BadCheckpoint(f"'{name[:200]}' belongs to no parameter of the adapter")
        if tensor.shape != shapes[name]:
            raise BadCheckpoint(f"{name} has shape {[*tensor.shape]}, the base takes {[*shapes[name]]}")
        if tensor.dtype not in NUMBER_TYPES:
            raise BadCheckpoint(f"{name} has number type {tensor.dtype}, which no adapter has")
        if not _is_finite(file, tensor):
            raise BadCheckpoint(f"{name} contains numbers that are not finite")
    if missing := shapes.keys() - tensors.keys():
        raise BadCheckpoint(f"{min(missing)} is missing")


def _is_finite(file: Path, tensor: StoredTensor) -> bool:
    """Whether all numbers of a tensor are finite. numpy has no bfloat16, so the numbers' bits are read."""
    integer, exponent = NUMBER_TYPES[tensor.dtype]
    bits = np.fromfile(file, integer, math.prod(tensor.shape), offset=tensor.offset)
    return not ((bits & exponent) == exponent).any()
