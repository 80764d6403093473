"""A tree computed node by node with a cache of keys and values, against the packed tree."""

import functools
from typing import Any

import torch

from art_server.trainer.tree import lay_out, sort_sequences
from gpu_check.machine import BARS, GIB, Cases, Line, Machine, RandomPolicy, distance, gradient

AGENTS = {"group": 8, "prompt": 1024, "completion": 64, "turns": 6, "strip": 16}
"""Rollouts of a tool agent whose template drops a part of each turn from later prompts, which makes a deep tree."""


def walk(machine: Machine) -> Cases:
    for name in machine.shapes[:2]:
        yield name, functools.partial(_walk, machine, name)


def _walk(machine: Machine, name: str) -> Line:
    """Compares a tree computed node by node, with the parents' keys and values in a cache, with one packed call. The
    loss is the hidden states' product with a fixed vector (their squares would not do: the last norm makes their sum
    the same for all weights)."""
    from transformers import DynamicCache

    shape = machine.shape(name)
    policy = RandomPolicy(shape, machine.dtype, machine.device)
    small = {"group": 3, "turns": 2} if machine.is_toy else {}
    groups = machine.groups(shape, machine.cell(**(AGENTS | small)))
    rows = [row["tokens"] for row in groups[0]]
    forest = lay_out(rows, sort_sequences(rows))
    body: Any = policy.model.get_base_model().model  # type: ignore[union-attr]
    chance = torch.Generator(machine.device).manual_seed(3)
    direction = torch.randn(shape["hidden"], generator=chance, device=machine.device)

    def hidden_of(
        node: Any, depth: int, above: list[tuple[torch.Tensor, torch.Tensor]] | None
    ) -> tuple[torch.Tensor, list]:
        cache = DynamicCache()
        for layer, (key, value) in enumerate(above or []):
            cache.update(key, value, layer)
        ids = forest.token_ids_T[node.start : node.stop][None].to(machine.device)
        positions = torch.arange(depth, depth + ids.shape[1], device=machine.device)[None]
        out = body(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
        layers: list[Any] = cache.layers
        return out.last_hidden_state, [(layer.keys, layer.values) for layer in layers]

    def clear() -> None:
        for parameter in policy.parameters.values():
            parameter.grad = None

    def walked() -> None:
        clear()
        policy.use_trees(False)
        losses, open_nodes = [], []
        for node in forest.nodes:
            open_nodes = [entry for entry in open_nodes if node.start < entry[0].end]
            above = open_nodes[-1] if open_nodes else None
            depth = above[1] if above else 0
            hidden, pairs = hidden_of(node, depth, above[2] if above else None)
            losses.append((hidden.float() @ direction).sum())
            open_nodes.append((node, depth + node.stop - node.start, pairs))
        torch.stack(losses).sum().backward()

    def packed() -> None:
        clear()
        policy.use_trees(True)
        arguments = policy._tree_arguments(forest)
        ids = arguments.pop("token_ids_BT")
        hidden = body(input_ids=ids, use_cache=False, **arguments).last_hidden_state
        (hidden[:, : forest.num_tokens].float() @ direction).sum().backward()

    packed()
    expected = gradient(policy)
    walked()
    apart = distance(gradient(policy), expected)
    seconds = {"packed": machine.timed(packed), "walk": machine.timed(walked)}
    return {
        "nodes": len(forest.nodes),
        "tokens": forest.num_tokens,
        "seconds": seconds,
        "peak_gib": {"packed": machine.peak(packed) / GIB, "walk": machine.peak(walked) / GIB},
        "gradient_distance": apart,
        "ok": machine.ok(apart < BARS[torch.bfloat16] and seconds["packed"] < seconds["walk"]),
    }
