"""Layers with a recurrent state over a forest: state-space layers, gated delta rules, short convolutions.

Such a layer mixes a token with earlier tokens through the state that they left, not by attention. Over a forest each node is
computed once, and each child starts from the node's final state (recurrent and convolution state), as from a cache.
transformers' layers read and write their state through a cache, so `_State` is a cache that keeps gradients.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from art_server.trainer.tree import Forest, Node

CACHE_NAMES = ("cache", "cache_params", "past_key_values")
"""The layers' argument for the cache, as transformers 5.24 and earlier versions name it."""
CHUNK = 64
"""Largest chunk size of state-space layers, which pad each sequence to a multiple of their chunk size. The usual 256
would be mostly padding. The result does not depend on it."""
MAX_PADDING = 2
"""Leaves are computed together if the longest is at most this many times as long as the shortest."""


@dataclass(frozen=True, slots=True)
class NodeRun:
    """Tokens that one call of a layer computes: a node's tokens, behind `num_repeated` tokens of the nodes above it.

    A layer's call for one token changes its state in place, which loses the gradient. So a node of one token leaves no state:
    its children repeat the token.
    """

    node: int
    parent: int | None
    """The node from whose final state the run starts; None: it starts without a state."""
    tokens: tuple[int, ...]
    """The indices of the run's tokens in the forest."""
    num_repeated: int


@dataclass(frozen=True, slots=True)
class LayerCalls:
    """The calls of a layer for a forest, in an order in which parents come before their children."""

    calls: list[list[NodeRun]]
    """The runs of one call are leaves, padded on the right to one length, or one run whose state its children need."""
    num_nodes: int


def plan_layer_calls(nodes: Sequence[Node]) -> LayerCalls:
    """The plan for the nodes of a forest, in depth-first order."""
    runs: list[NodeRun] = []
    parents: set[int | None] = set()
    above: list[int] = []
    for index, node in enumerate(nodes):
        while above and nodes[above[-1]].end <= node.start:
            above.pop()
        own = tuple(range(node.start, node.stop))
        parent, repeated = None, ()
        if above:
            parent = above[-1]
            if len(runs[parent].tokens) < 2:
                parent, repeated = runs[parent].parent, runs[parent].tokens
        parents.add(parent)
        runs.append(NodeRun(index, parent, repeated + own, len(repeated)))
        above.append(index)
    calls = [[run] for run in runs if run.node in parents]
    leaves = [run for run in runs if run.node not in parents]
    # One call has one cache: all its rows start from a state, or none does.
    for run in sorted(leaves, key=lambda run: (run.parent is None, len(run.tokens))):
        first = calls[-1][0] if calls else None
        if (
            first is not None
            and first.node not in parents
            and (first.parent is None) == (run.parent is None)
            and len(run.tokens) <= MAX_PADDING * len(first.tokens)
        ):
            calls[-1].append(run)
        else:
            calls.append([run])
    return LayerCalls(calls, len(nodes))


class ForestStates:
    """What the recurrent layers of a model compute over: a forest, or usual rows."""

    def __init__(self) -> None:
        self._nodes: Sequence[Node] | None = None
        self._plan: LayerCalls | None = None

    def use(self, forest: Forest | None) -> None:
        """Has the layers compute over the forest from here on; None: rows."""
        nodes = None if forest is None else forest.nodes
        if nodes is not self._nodes:
            self._nodes, self._plan = nodes, None

    def plan(self) -> LayerCalls | None:
        """The plan for the forest, made once for all layers; None for rows."""
        if self._plan is None and self._nodes is not None:
            self._plan = plan_layer_calls(self._nodes)
        return self._plan


def share_states(model: PreTrainedModel) -> ForestStates:
    """Has the model's recurrent layers compute over the forest that the returned object holds."""
    states = ForestStates()
    for module in model.modules():
        cache_name = _cache_name(module)
        if cache_name is not None:
            if isinstance(chunk := getattr(module, "chunk_size", None), int):
                setattr(module, "chunk_size", min(CHUNK, chunk))  # noqa: B010  # torch types no such attribute
            module.forward = _over_forest(module, cache_name, states)
    return states


def _cache_name(module: torch.nn.Module) -> str | None:
    """The argument by which a recurrent layer takes its cache; None for other modules."""
    if not any(isinstance(child, torch.nn.Conv1d) for child in module.children()):
        return None
    accepted = inspect.signature(type(module).forward).parameters
    return next((name for name in CACHE_NAMES if name in accepted), None)


def _over_forest(module: torch.nn.Module, cache_name: str, states: ForestStates) -> Callable[..., torch.Tensor]:
    usual = module.forward
    kernel = max(child.kernel_size[0] for child in module.children() if isinstance(child, torch.nn.Conv1d))

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Any: what the model's decoder layer passes on
        plan = states.plan()
        if plan is None:
            return usual(hidden_states, *args, **kwargs)
        outputs: list[torch.Tensor] = [hidden_states] * plan.num_nodes
        ends: dict[int, _State] = {}
        for runs in plan.calls:
            start = _State(kernel)
            if runs[0].parent is not None:
                start = _State.stacked([ends[run.parent] for run in runs if run.parent is not None])
            rows = _rows(hidden_states, runs)
            out_RTD = usual(rows, **{**kwargs, cache_name: start})
            if len(runs) == 1:
                ends[runs[0].node] = start
            for out_TD, run in zip(out_RTD, runs, strict=True):
                outputs[run.node] = out_TD[run.num_repeated : len(run.tokens)]
        return torch.cat(outputs)[None]

    return forward


def _rows(hidden_1TD: torch.Tensor, runs: Sequence[NodeRun]) -> torch.Tensor:
    """The inputs of runs, padded with zeros on the right to one length of at least two."""
    length = max(2, *(len(run.tokens) for run in runs))
    rows = []
    for run in runs:
        first, last = run.tokens[run.num_repeated], run.tokens[-1]
        row = hidden_1TD[0, first : last + 1]
        if run.num_repeated:
            row = torch.cat([hidden_1TD[0, list(run.tokens[: run.num_repeated])], row])
        rows.append(torch.nn.functional.pad(row, (0, 0, 0, length - len(row))))
    return torch.stack(rows)


class _State:
    """The state of one layer. It replaces transformers' Cache (5.17 to 5.24, `cache_utils.py`), which copies into its tensors
    and so has no gradient."""

    record_past = True
    """Where this is true, the layers leave the convolution's state to `update_conv_state`."""

    def __init__(self, kernel: int) -> None:
        self.kernel = kernel
        self.conv_states: dict[int, torch.Tensor] = {}
        self.recurrent_states: dict[int, torch.Tensor] = {}
        self.has_started = False
        self.layers = _Everywhere(self)

    @classmethod
    def stacked(cls, states: Sequence["_State"]) -> "_State":
        """The states of several rows, joined to the state of one batch with these rows."""
        batch = cls(states[0].kernel)
        batch.has_started = True
        for kind in ("conv_states", "recurrent_states"):
            parts = [getattr(state, kind) for state in states]
            joined = {index: torch.cat([part[index] for part in parts]) for index in parts[0]}
            setattr(batch, kind, joined)
        return batch

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.has_started

    def is_recording_past(self, layer_idx: int) -> bool:
        return self.record_past

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.conv_states.get(state_idx) if self.has_started else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.recurrent_states.get(state_idx) if self.has_started else None

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """The inputs of a convolution, behind the inputs before them: rows x channels x tokens."""
        before = self.conv_states.get(state_idx)
        joined = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        missing = max(0, self.kernel - joined.shape[-1])
        joined = torch.nn.functional.pad(joined, (missing, 0))
        self.conv_states[state_idx] = joined[..., -self.kernel :]
        return joined

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


class _Everywhere:
    """Has the same state at each index: transformers' layers look their state up by their index."""

    def __init__(self, state: _State) -> None:
        self._state = state

    def __getitem__(self, _: int) -> _State:
        return self._state
