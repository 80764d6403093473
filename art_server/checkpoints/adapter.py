"""Reads an untrusted PEFT folder and checks its configuration and tensors, without torch.

An adapter that passes is a plain LoRA: pairs of A and B matrices of the configured rank. The trainer checks that it
fits the base model (`trainer/checkpoint.py`).
"""

import json
import math
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from art_protocol.wire import LoRAConfig
from art_server.errors import InvalidInput
from art_server.store.model_folder import ADAPTER_FILE, CONFIG_FILE, OPTIMIZER_FILE

MAX_CONFIG_BYTES = 2**20
MAX_RANK = 512
FLOATS = ("F32", "F16", "BF16")
OTHER_KINDS = (
    *(
        "alora_invocation_tokens",
        "alpha_pattern",
        "arrow_config",
        "exclude_modules",
        "fan_in_fan_out",
    ),
    *("kasa_config", "layer_replication", "layers_to_transform", "lora_bias", "modules_to_save"),
    *("monteclora_config", "rank_pattern", "target_parameters", "trainable_token_indices"),
    *("use_bdlora", "use_dora", "use_qalora", "use_rslora", "velora_config"),
)
"""Fields of PEFT's LoraConfig (0.21). An adapter that sets one is not base + B A alpha / rank."""
PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the base model's weights unchanged; PiSSA, OLoRA and LoftQ change them."""
TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?")


def read_adapter(folder: Path) -> tuple[LoRAConfig, str | None]:
    """Returns the LoRA shape of the adapter in a PEFT folder, and the base model that its configuration names.

    Raises:
        InvalidInput: the folder holds no plain LoRA adapter; the message names the file or the field.
    """
    config = _read_config(folder / CONFIG_FILE)
    lora = _read_lora(config)
    _check_tensors(read_shapes(folder / ADAPTER_FILE), lora.rank)
    if (folder / OPTIMIZER_FILE).exists():
        read_shapes(folder / OPTIMIZER_FILE)
    base = config.get("base_model_name_or_path")
    return lora, base if isinstance(base, str) and base else None


def read_shapes(file: Path) -> dict[str, tuple[str, list[int]]]:
    """Returns dtype and shape of each tensor in a safetensors file, by name. Reads only the header.

    Raises:
        InvalidInput: the file is missing, or is not a safetensors file.
    """
    try:
        with safe_open(file, framework="np") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 - it has no other iterator
            return {name: (each.get_dtype(), each.get_shape()) for name, each in slices.items()}
    except (SafetensorError, OSError) as error:
        raise _bad(
            f"{file.name} is not a safetensors file ({error}): save the adapter with safe_serialization=True"
        ) from error


def _read_config(file: Path) -> dict[str, Any]:
    # Any: arbitrary JSON; each field is checked where it is used.
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise _bad(f"{CONFIG_FILE} has more than {MAX_CONFIG_BYTES} bytes")
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _bad(
            f"{CONFIG_FILE} cannot be read ({type(error).__name__}): it must be the JSON that PEFT writes"
        ) from error
    if not isinstance(config, dict):
        raise _bad(f"{CONFIG_FILE} must hold a JSON object")
    return config


def _read_lora(config: dict[str, Any]) -> LoRAConfig:
    """Returns the LoRA shape that an adapter_config.json describes.

    Raises:
        InvalidInput: the configuration is not that of a plain LoRA.
    """
    rank, alpha, targets = (config.get(name) for name in ("r", "lora_alpha", "target_modules"))
    if config.get("peft_type") != "LORA":
        raise _bad(f"peft_type is {_shown(config.get('peft_type'))}: only 'LORA' is supported")
    if config.get("task_type") not in ("CAUSAL_LM", None):
        raise _bad(f"task_type is {_shown(config['task_type'])}: only 'CAUSAL_LM' is supported")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
        raise _bad(f"r is {_shown(rank)}: it must be a whole number from 1 to {MAX_RANK}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < math.inf:
        raise _bad(f"lora_alpha is {_shown(alpha)}: it must be a positive number")
    if config.get("bias", "none") != "none":
        raise _bad(f"bias is {_shown(config['bias'])}: only 'none' is supported")
    for name in OTHER_KINDS:
        if config.get(name):
            raise _bad(
                f"{name} is set, so this is not a plain LoRA: merge the adapter, or train one without it"
            )
    start = config.get("init_lora_weights")
    if not isinstance(start, bool | str | None) or start not in PLAIN_STARTS:
        raise _bad(
            f"init_lora_weights is {_shown(start)}, which changes the base's weights: convert the adapter to a plain LoRA"
        )
    if isinstance(targets, list):
        if not targets or not all(
            isinstance(each, str) and 0 < len(each) <= 256 for each in targets
        ):
            raise _bad("target_modules must hold one or more names of layers")
        return LoRAConfig(rank=rank, alpha=float(alpha), target_modules=sorted(set(targets)))
    if not isinstance(targets, str | None):
        raise _bad(f"target_modules is {_shown(targets)}: it must be a list of names")
    # A pattern is not evaluated. The trainer refuses the adapter if its tensors do not cover all linear layers.
    return LoRAConfig(rank=rank, alpha=float(alpha))


def _check_tensors(shapes: dict[str, tuple[str, list[int]]], rank: int) -> None:
    """Checks that the tensors are pairs of LoRA matrices.

    Raises:
        InvalidInput: a tensor is not a LoRA matrix of this rank, or its A or B counterpart is missing.
    """
    halves: dict[str, set[str]] = {}
    for name, (kind, shape) in shapes.items():
        found = TENSOR.fullmatch(name)
        if found is None:
            raise _bad(
                f"tensor '{name[:200]}' does not have the name that PEFT gives a LoRA matrix"
            )
        module, half = found.groups()
        if kind not in FLOATS or len(shape) != 2 or 0 in shape:
            raise _bad(
                f"tensor '{name[:200]}' is {kind} {shape[:4]}: it must be a matrix of {', '.join(FLOATS)}"
            )
        if shape["AB".index(half)] != rank:
            raise _bad(
                f"tensor '{name[:200]}' has shape {shape}, which is not of rank {rank} (r in {CONFIG_FILE})"
            )
        halves.setdefault(module, set()).add(half)
    if not halves:
        raise _bad(f"{ADAPTER_FILE} holds no tensors")
    for module, found_halves in halves.items():
        if len(found_halves) != 2:
            raise _bad(
                f"layer '{module[:200]}' has only lora_{min(found_halves)}: an adapter needs A and B"
            )


def _shown(value: object) -> str:
    return repr(value)[:80]


def _bad(problem: str) -> InvalidInput:
    return InvalidInput(
        f"this adapter cannot be used: {problem}", code="bad_adapter", param="adapter"
    )
