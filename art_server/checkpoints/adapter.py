"""Reading an adapter that somebody else may have written: a PEFT folder's configuration and tensors, checked without torch.

What passes here is a plain LoRA whose matrices fit each other. The trainer checks it against its base model
(`trainer/checkpoint.py`).
"""

import json
import math
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from art.wire import LoRAConfig
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
"""Fields of PEFT's LoraConfig (0.21) that, when set, make the adapter another function than base + B A alpha / rank."""
PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the base's weights as they are; PiSSA, OLoRA and LoftQ change them."""
TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?")


def read_adapter(folder: Path) -> tuple[LoRAConfig, str | None]:
    """The shape of the adapter in a PEFT folder, and the base model that it names.

    Raises:
        InvalidInput: no plain LoRA adapter; the message names the file, the field and the remedy.
    """
    config = _read_config(folder / CONFIG_FILE)
    lora = _read_lora(config)
    _check_tensors(read_shapes(folder / ADAPTER_FILE), lora.rank)
    if (folder / OPTIMIZER_FILE).exists():
        read_shapes(folder / OPTIMIZER_FILE)
    base = config.get("base_model_name_or_path")
    return lora, base if isinstance(base, str) and base else None


def read_shapes(file: Path) -> dict[str, tuple[str, list[int]]]:
    """Number type and shape of each tensor of a safetensors file, by name; its header is checked, its content not read.

    Raises:
        InvalidInput: there is no such file, or it is not one.
    """
    try:
        with safe_open(file, framework="np") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 - it has no other iterator
            return {name: (each.get_dtype(), each.get_shape()) for name, each in slices.items()}
    except (SafetensorError, OSError) as error:
        raise _bad(
            f"{file.name} is no safetensors file ({error}): save the adapter with safe_serialization=True"
        ) from error


def _read_config(file: Path) -> dict[str, Any]:
    # Any: whatever stands in the file; each field is checked where it is used.
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise _bad(f"{CONFIG_FILE} has more than {MAX_CONFIG_BYTES} bytes")
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _bad(
            f"{CONFIG_FILE} cannot be read ({type(error).__name__}): it must be the JSON that PEFT writes"
        ) from error
    if not isinstance(config, dict):
        raise _bad(f"{CONFIG_FILE} holds no JSON object")
    return config


def _read_lora(config: dict[str, Any]) -> LoRAConfig:
    """
    Raises:
        InvalidInput: another kind of adapter than a plain LoRA.
    """
    rank, alpha, targets = (config.get(name) for name in ("r", "lora_alpha", "target_modules"))
    if config.get("peft_type") != "LORA":
        raise _bad(f"peft_type is {_shown(config.get('peft_type'))}: only 'LORA' can be taken in")
    if config.get("task_type") not in ("CAUSAL_LM", None):
        raise _bad(f"task_type is {_shown(config['task_type'])}: only 'CAUSAL_LM' can be taken in")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
        raise _bad(f"r is {_shown(rank)}: it must be a whole number from 1 to {MAX_RANK}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < math.inf:
        raise _bad(f"lora_alpha is {_shown(alpha)}: it must be a positive number")
    if config.get("bias", "none") != "none":
        raise _bad(f"bias is {_shown(config['bias'])}: only 'none' can be taken in")
    for name in OTHER_KINDS:
        if config.get(name):
            raise _bad(
                f"{name} is set, which makes it no plain LoRA: merge the adapter, or train one without it"
            )
    start = config.get("init_lora_weights")
    if not isinstance(start, bool | str | None) or start not in PLAIN_STARTS:
        raise _bad(
            f"init_lora_weights is {_shown(start)}, which changes the base's weights: convert it to a plain LoRA"
        )
    if isinstance(targets, list):
        if not targets or not all(
            isinstance(each, str) and 0 < len(each) <= 256 for each in targets
        ):
            raise _bad("target_modules must be names of layers")
        return LoRAConfig(rank=rank, alpha=float(alpha), target_modules=sorted(set(targets)))
    if not isinstance(targets, str | None):
        raise _bad(f"target_modules is {_shown(targets)}: it must be a list of names")
    # A pattern is never matched here; the trainer sees whether it meant all layers.
    return LoRAConfig(rank=rank, alpha=float(alpha))


def _check_tensors(shapes: dict[str, tuple[str, list[int]]], rank: int) -> None:
    """
    Raises:
        InvalidInput: a tensor that is no LoRA matrix of this rank, or is without its other half.
    """
    halves: dict[str, set[str]] = {}
    for name, (kind, shape) in shapes.items():
        found = TENSOR.fullmatch(name)
        if found is None:
            raise _bad(f"tensor '{name[:200]}' is no LoRA matrix under PEFT's name for it")
        module, half = found.groups()
        if kind not in FLOATS or len(shape) != 2 or 0 in shape:
            raise _bad(
                f"tensor '{name[:200]}' is {kind} {shape[:4]}: it must be a matrix of {', '.join(FLOATS)}"
            )
        if shape["AB".index(half)] != rank:
            raise _bad(
                f"tensor '{name[:200]}' has shape {shape}, which is not of rank {rank} ({CONFIG_FILE}: r)"
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
        f"this adapter cannot be taken in: {problem}", code="bad_adapter", param="adapter"
    )
