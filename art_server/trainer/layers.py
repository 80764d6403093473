"""The layers of a base model that take an adapter: linear layers of the language model's decoder, by their paths.

Layers of other parts (towers that see or hear, projectors, routers, experts, heads) can have the same last names, so a
name alone chooses none.
"""

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

PEFT_REFUSES_OUT_PROJ = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
"""Families in which PEFT takes every `out_proj` for a state-space layer's, which another kernel multiplies."""
EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj")
"""PEFT takes a layer of such a name in a mixture for a part of an expert (Arcee Trinity's attention has a `gate_proj`)."""

HALVED = {"glm4": "gate_up_proj"}
"""Layers of which vLLM's class of a family adapts the halves, by their own names."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The linear layers of a decoder, by path."""

    takes: frozenset[str]
    """Those that take an adapter."""
    folded: frozenset[str]
    """Those whose weights vLLM folds into others when it loads them: an adapter there would be lost or refused."""
    is_mixture: bool
    """Whether the model is a mixture of experts. Its adapters change attention only: routers stay as they are, and vLLM
    supports adapted experts on few devices."""


def find_layers(model: PreTrainedModel) -> Layers:
    """The layers of a model, which may be without weights."""
    modules = _decoder_modules(model)
    family = model.config.model_type
    is_mixture = any(_holds_experts(path, each) for path, each in modules.items())
    takes, folded = set[str](), set[str]()
    for path, each in modules.items():
        before, _, last = path.rpartition(".")
        if not isinstance(each, torch.nn.Linear | Conv1D):
            continue
        if is_mixture and (last in EXPERT_NAMES or not _is_attention(path, model)):
            continue
        if last == "out_proj" and family in PEFT_REFUSES_OUT_PROJ:
            continue
        # Latent attention keeps two matrices made of one; keys without a value layer are the values, too.
        is_value = last == "k_proj" and f"{before}.v_proj" not in modules
        if last == "kv_b_proj" or is_value or last == HALVED.get(family):
            folded.add(path)
        else:
            takes.add(path)
    return Layers(frozenset(takes), frozenset(folded), is_mixture)


def _decoder_modules(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """The modules inside the layers of a model's decoder, by path."""
    decoder = model.get_decoder()
    prefix = next(name for name, each in model.named_modules() if each is decoder)
    modules: dict[str, torch.nn.Module] = {}
    for name, layer in decoder.named_modules(prefix=prefix):
        if isinstance(layer, GradientCheckpointingLayer):
            for path, each in layer.named_modules(prefix=name):
                if path != name:
                    modules[path] = each
    return modules


def _holds_experts(path: str, module: torch.nn.Module) -> bool:
    is_stack = any(each.dim() == 3 for each in module.parameters(recurse=False))
    is_convolution = isinstance(module, torch.nn.Conv1d)
    return "experts" in path.split(".") or (is_stack and not is_convolution)


def _is_attention(path: str, model: PreTrainedModel) -> bool:
    """Whether a layer lies in attention, also in linear attention."""
    parent = type(model.get_submodule(path.rpartition(".")[0])).__name__
    return "Attention" in parent or any("attn" in part for part in path.split("."))


def layer_kind(path: str) -> str:
    """What a layer's path has behind the number of its decoder layer, as `self_attn.q_proj`."""
    before, _, behind = _split(path)
    return behind or before


def find_targets(names: list[str] | None, model: PreTrainedModel) -> list[str] | str:
    """PEFT's `target_modules` for the layers that `names` means, None for all: last names if they mean no other layer of
    the model, else a pattern of paths.

    Raises:
        ValueError: `names` means something else than layers that take an adapter.
    """
    layers = find_layers(model)
    if names == []:
        raise ValueError("lora.target_modules is empty: name layers, or leave it out")
    everywhere = {name for name, _ in model.named_modules()}
    chosen = layers.takes if names is None else _named_layers(names, layers, everywhere)
    usual = sorted(names or {each.rpartition(".")[2] for each in chosen})
    meant = set[str]()
    for name in usual:
        meant |= _ending_with(name, everywhere)
    return usual if meant == chosen else _pattern(chosen, everywhere)


def renamed(names: list[str] | None, preferred: Iterable[list[str] | None], model: PreTrainedModel) -> list[str] | None:
    """Names that mean the same layers as `names`, if these are paths: the first of `preferred` that do, else None for all
    layers, else last names, if they mean no other layer. Names that are no paths stay."""
    layers = find_layers(model)
    if names is None or not layers.takes.issuperset(names):
        return names
    everywhere = {name for name, _ in model.named_modules()}
    for candidate in (*preferred, None, sorted({name.rpartition(".")[2] for name in names})):
        with contextlib.suppress(ValueError):  # its names mean layers that take no adapter
            chosen = layers.takes if candidate is None else _named_layers(candidate, layers, everywhere)
            if chosen == set(names):
                return candidate
    return names


def _named_layers(names: list[str], layers: Layers, everywhere: set[str]) -> frozenset[str]:
    """The layers that `names` means, by path. Raises ValueError if they take no adapter."""
    inside = layers.takes | layers.folded
    chosen, beyond = set[str](), list[str]()
    for name in names:
        found = _ending_with(name, everywhere)
        found = found & inside or found  # the same name may occur in other parts of the model
        chosen |= found
        if not found or not found <= layers.takes:
            beyond.append(name)
    if beyond:
        raise ValueError(_beyond(sorted(beyond), layers))
    return frozenset(chosen)


def _ending_with(name: str, paths: set[str]) -> set[str]:
    return {path for path in paths if f".{path}".endswith(f".{name}")}


def _beyond(names: list[str], layers: Layers) -> str:
    rule = "only the linear layers of the language model take an adapter, without the output head"
    if layers.is_mixture:
        rule = "in a mixture of experts only the attention takes an adapter"
    if any(f".{each}".endswith(f".{name}") for name in names for each in layers.folded):
        rule = "vLLM folds this layer into others when it loads the model, so an adapter would be lost"
    choices = ", ".join(sorted({each.rpartition(".")[2] for each in layers.takes}))
    return (
        f"lora.target_modules names {', '.join(names)}, but {rule}: choose from {choices}, or leave target_modules out"
    )


def _pattern(paths: frozenset[str], modules: set[str]) -> str:
    """A pattern that matches these paths of a model's modules, and no others."""
    numbers, in_model = _numbers(paths), _numbers(modules)
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (before, behind), found in sorted(numbers.items()):
        is_everywhere = found == in_model[before, behind]
        which = r"\d+" if is_everywhere else f"({'|'.join(sorted(found, key=int))})"
        groups[before, which].append(re.escape(behind))
    return "|".join(rf"{re.escape(before)}\.{which}\.({'|'.join(names)})" for (before, which), names in groups.items())


def _numbers(paths: Iterable[str]) -> dict[tuple[str, str], set[str]]:
    """Maps what paths have before and behind the number of their layer to these numbers."""
    numbers: dict[tuple[str, str], set[str]] = defaultdict(set)
    for path in paths:
        before, number, behind = _split(path)
        numbers[before, behind].add(number)
    return numbers


def _split(path: str) -> tuple[str, str, str]:
    """The parts of a path before, at and behind the layer's number; empty at the number if it has none."""
    found = re.match(r"(.*?)\.(\d+)\.(.*)$", path)
    return (found[1], found[2], found[3]) if found else (path, "", "")
