"""Which layers of a base model an adapter has: the names of `LoRAConfig.target_modules`, compared with the base model's record.

A name is the end of a layer's path, in whole parts: `q_proj`, `self_attn.q_proj`, `layers.3.self_attn.q_proj`. Layers of other
parts of a model can have the same last names, so a name alone chooses none. `trainer/layers.py` finds the layers of a model.
"""

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Layers:
    """The linear layers of a base model's decoder, by path."""

    shapes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Layers that take an adapter, in the model's order, each with its number of inputs and of outputs."""
    folded: tuple[str, ...] = ()
    """Layers whose weights vLLM folds into others when it loads the model: an adapter there would be lost or refused."""
    namesakes: tuple[str, ...] = ()
    """All other modules whose last name is also the last name of a layer that takes an adapter."""
    is_mixture: bool = False
    """Whether the model is a mixture of experts. Its adapters change attention only: routers stay as they are, and vLLM
    supports adapted experts on few devices."""

    @property
    def takes(self) -> frozenset[str]:
        """The layers that take an adapter."""
        return frozenset(self.shapes)

    @property
    def last_names(self) -> tuple[str, ...]:
        """The last names of the layers that take an adapter, sorted."""
        return tuple(sorted({path.rpartition(".")[2] for path in self.shapes}))


class UnknownLayers(ValueError):
    """`target_modules` names something else than layers that take an adapter."""


def chosen_layers(names: list[str] | None, layers: Layers) -> frozenset[str]:
    """The layers that `names` means, by path (None: all layers that take an adapter).

    Raises:
        UnknownLayers: a name means something else than layers that take an adapter.
    """
    if names is None:
        return layers.takes
    if not names:
        raise UnknownLayers("lora.target_modules is empty: name layers, or leave it out")
    inside = layers.takes | {*layers.folded}
    chosen, beyond = set[str](), list[str]()
    for name in names:
        matches = _ending_with(name, inside)
        chosen |= matches
        if not matches or not matches <= layers.takes:
            beyond.append(name)
    if beyond:
        raise UnknownLayers(_beyond(sorted(beyond), layers))
    return frozenset(chosen)


def find_targets(names: list[str] | None, layers: Layers) -> list[str] | str:
    """PEFT's `target_modules` for the layers that `names` means (None: all layers that take an adapter): last names if
    these mean no other layer of the model, else a pattern of paths.

    Raises:
        UnknownLayers: `names` means something else than layers that take an adapter.
    """
    chosen = chosen_layers(names, layers)
    everywhere = {*layers.shapes, *layers.folded, *layers.namesakes}
    usual = sorted({*(names or (path.rpartition(".")[2] for path in chosen))})
    meant = set[str]()
    for name in usual:
        meant |= _ending_with(name, everywhere)
    return usual if meant == chosen else _pattern(chosen, everywhere)


def renamed(names: list[str] | None, preferred: Iterable[list[str] | None], layers: Layers) -> list[str] | None:
    """Shorter names for the layers of `names`, if these are paths; other names stay. The first that means exactly these
    layers: an entry of `preferred`, None (all layers), the layers' last names. Without one the paths stay."""
    if names is None or not layers.takes.issuperset(names):
        return names
    for candidate in (*preferred, None, sorted({name.rpartition(".")[2] for name in names})):
        with contextlib.suppress(UnknownLayers):
            if chosen_layers(candidate, layers) == set(names):
                return candidate
    return names


def layer_kind(path: str) -> str:
    """The part of a layer's path behind its decoder layer's number: `model.layers.3.mlp.up_proj` -> `mlp.up_proj`."""
    before, _, behind = _split(path)
    return behind or before


def _ending_with(name: str, paths: Iterable[str]) -> set[str]:
    """The paths that end with a whole name: `q_proj` matches `self_attn.q_proj`, not `self_attn.kq_proj`."""
    return {path for path in paths if f".{path}".endswith(f".{name}")}


def _beyond(names: list[str], layers: Layers) -> str:
    rule = "only the linear layers of the language model take an adapter, without the output head"
    if layers.is_mixture:
        rule = "in a mixture of experts only the attention takes an adapter"
    if any(_ending_with(name, layers.folded) for name in names):
        rule = "vLLM folds this layer into others when it loads the model, so an adapter would be lost"
    choices = ", ".join(layers.last_names)
    return (
        f"lora.target_modules names {', '.join(names)}, but {rule}: choose from {choices}, or leave target_modules out"
    )


def _pattern(paths: frozenset[str], modules: set[str]) -> str:
    """A pattern that matches these paths of a model's modules, and no others."""
    numbers, in_model = _numbers(paths), _numbers(modules)
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (before, behind), layer_numbers in sorted(numbers.items()):
        is_everywhere = layer_numbers == in_model[before, behind]
        which = r"\d+" if is_everywhere else f"({'|'.join(sorted(layer_numbers, key=int))})"
        groups[before, which].append(re.escape(behind))
    return "|".join(rf"{re.escape(before)}\.{which}\.({'|'.join(names)})" for (before, which), names in groups.items())


def _numbers(paths: Iterable[str]) -> dict[tuple[str, str], set[str]]:
    """The layer numbers of paths, by the parts of a path before and behind the number."""
    numbers: dict[tuple[str, str], set[str]] = defaultdict(set)
    for path in paths:
        before, number, behind = _split(path)
        numbers[before, behind].add(number)
    return numbers


def _split(path: str) -> tuple[str, str, str]:
    """The parts of a path before, at and behind the layer's number: `layers.3.mlp.up_proj` -> `layers`, `3`, `mlp.up_proj`.
    A path without a number is the first part, and the other parts are empty."""
    match = re.match(r"(.*?)\.(\d+)\.(.*)$", path)
    return (match[1], match[2], match[3]) if match else (path, "", "")
