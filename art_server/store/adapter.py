"""Reads the configuration of an untrusted PEFT folder. Only a plain LoRA passes.

A rank-stabilised LoRA is a plain one with another alpha. Layers that a configuration selects by patterns, numbers or
exclusions, or does not name at all, are named by the adapter's tensors. `adapter_tensors.py` checks that the tensors belong to this LoRA on the base
model.
"""

import json
import math
import re
import struct
from pathlib import Path
from typing import Any

from art_protocol.wire import LoRAConfig
from art_server.errors import InvalidInput
from art_server.store.model_folder import ADAPTER_FILE, CONFIG_FILE
from art_server.store.selected_layers import FIELDS, BadPattern, not_selected

MAX_CONFIG_BYTES = 2**20
MAX_HEADER_BYTES = 100_000_000
"""Largest header of a safetensors file, as the format's library limits it."""
# MAX_RANK is the highest rank with which vLLM can be started (`settings.LoraRank`).
MAX_RANK, MAX_ALPHA = 512, 65_536
READ = {"peft_type", "task_type", "r", "lora_alpha", "use_rslora", "init_lora_weights", *FIELDS}
WITHOUT_EFFECT = {
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
}
"""Fields of PEFT's configuration (0.21) that do not change what the saved matrices mean. Any other
field passes only if it is not set, so a later PEFT cannot bring a kind of adapter that is not base + B A alpha / rank."""
UNSET = (None, False, 0, "", "none", [], {})
PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the base model's weights unchanged; PiSSA, OLoRA and LoftQ change them."""


def read_lora(folder: Path) -> tuple[LoRAConfig, str | None]:
    """Returns the LoRA shape that the configuration of a PEFT folder describes, and the base model that it names.

    Raises:
        InvalidInput: this is not the configuration of a plain LoRA; the message names the field.
    """
    config = _read_config(folder / CONFIG_FILE)
    rank, alpha, is_stabilised = (config.get(name) for name in ("r", "lora_alpha", "use_rslora"))
    start, base = config.get("init_lora_weights"), config.get("base_model_name_or_path")
    if config.get("peft_type") != "LORA":
        raise _bad(f"peft_type is {_shown(config.get('peft_type'))}: only 'LORA' is supported")
    if config.get("task_type") not in ("CAUSAL_LM", None):
        raise _bad(f"task_type is {_shown(config['task_type'])}: only 'CAUSAL_LM' is supported")
    for name in config.keys() - READ - WITHOUT_EFFECT:
        if config[name] not in UNSET:
            raise _bad(
                f"{name[:80]} is {_shown(config[name])}, so this is not a plain LoRA: merge the adapter, or train one "
                "without it"
            )
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
        raise _bad(f"r is {_shown(rank)}: it must be a whole number from 1 to {MAX_RANK}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < math.inf:
        raise _bad(f"lora_alpha is {_shown(alpha)}: it must be a positive number")
    if not isinstance(is_stabilised, bool | None):
        raise _bad(f"use_rslora is {_shown(is_stabilised)}: it must be true or false")
    if is_stabilised:  # PEFT scales by alpha / sqrt(r), Kalajdzievski 2023, arXiv:2312.03732, section 3
        alpha *= math.sqrt(rank)
    if alpha > MAX_ALPHA:
        raise _bad(f"lora_alpha scales the adapter by {alpha / rank:g}: alpha can be at most {MAX_ALPHA}")
    if not isinstance(start, bool | str | None) or start not in PLAIN_STARTS:
        raise _bad(
            f"init_lora_weights is {_shown(start)}, which changes the base's weights: convert the adapter to a plain LoRA"
        )
    return (
        LoRAConfig(rank=rank, alpha=float(alpha), target_modules=_read_targets(config, folder / ADAPTER_FILE)),
        base if isinstance(base, str) and base else None,
    )


def _read_targets(config: dict[str, Any], tensors: Path) -> list[str]:
    """The names of the adapted layers. Whole paths where the configuration has no list of names."""
    targets, numbers = config.get("target_modules"), config.get("layers_to_transform")
    if config.get("exclude_modules") or numbers not in (None, []) or not isinstance(targets, list):
        return _layers_of(config, tensors)
    if not targets:
        raise _bad("target_modules is []: it must be a list of names of layers")
    names: set[str] = set()
    for name in targets:
        if not isinstance(name, str) or not 0 < len(name) <= 256:
            raise _bad(f"target_modules has {_shown(name)}, which is not the name of a layer")
        names.add(name)
    return sorted(names)


def _layers_of(config: dict[str, Any], tensors: Path) -> list[str]:
    """The paths of the layers that an adapter's tensors belong to, which the configuration has to select: PEFT ignores the
    tensors of other layers, and layers without tensors stay as they are."""
    layers = sorted({match[1] for name in _tensor_names(tensors) if (match := TENSOR.fullmatch(name))})
    try:
        ignored = not_selected(config, layers)
    except BadPattern as error:
        raise _bad(str(error)) from error
    if not layers or ignored:
        which = f"of {ignored[0][:200]}, which {' and '.join(FIELDS)} leave out" if ignored else "of no layer"
        raise _bad(
            f"{ADAPTER_FILE} has tensors {which}: save the adapter with the configuration that it was trained with"
        )
    return layers


TENSOR = re.compile(r"base_model\.model\.(.{1,256})\.lora_(?:embedding_)?[AB](?:\.weight)?")
"""The name of a tensor in PEFT's format, with the path of its layer."""


def _tensor_names(file: Path) -> list[str]:
    """The names in the header of a safetensors file."""
    try:
        with open(file, "rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            if size > MAX_HEADER_BYTES:
                raise ValueError("its header is too large")
            header = json.loads(opened.read(size))
            if not isinstance(header, dict):
                return []
            return [name for name in header if isinstance(name, str)]
    except (OSError, ValueError, RecursionError, struct.error) as error:
        raise _bad(
            f"{ADAPTER_FILE} cannot be read ({type(error).__name__}), whose layers target_modules describes: save the adapter "
            "with safe_serialization=True"
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


def _shown(value: object) -> str:
    return repr(value)[:80]


def _bad(problem: str) -> InvalidInput:
    return InvalidInput(f"this adapter cannot be used: {problem}", code="bad_adapter", param="adapter")
