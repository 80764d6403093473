"""Attention over a forest: query q attends to key k exactly when k <= q < end[k] (and, with a sliding window, when
their positions are less than the window apart).

`tree_attention` is registered with transformers as TREE_ATTENTION. A model gets the forest as `forest=` beside `input_ids`
and passes it to each layer. There are two kinds with the same result:

    segments  CPU: in the depth-first layout a node's descendants are one run, so attention is one causal call for each
              node and one unmasked call for all its descendants on its keys, joined by their log-sum-exps.
              No mask, no padding, no copies of a trunk's keys; time and memory depend on the unique tokens only.
    flex      CUDA: one FlexAttention call with a block mask.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from art_server.trainer.facts import AttentionKind
from art_server.trainer.tree import Forest, Node

TREE_ATTENTION = "art_tree"

HIDDEN = -1e9
"""Added to a masked score: its exp is then exactly 0 beside any real score. With -inf, a query whose keys in a
segment are all masked would get NaN."""

FLEX_BLOCK = 128
"""FlexAttention's block size. Forests are padded to a multiple, so that kernels are not compiled for each length."""

MIN_FLEX_TOKENS = 256
"""Forests are padded to at least this length: a single block would need a separate compiled graph."""

MAX_GRAPHS = 64


@dataclass(frozen=True, slots=True)
class Segment:
    """Queries [query, query_stop) on keys [key, key_stop)."""

    query: int
    query_stop: int
    key: int
    key_stop: int
    is_causal: bool
    """The queries are the same tokens as the keys: each attends to the keys up to itself."""
    mask: torch.Tensor | None = None
    """float32, added to the scores. None if every query attends to every key (up to itself, if causal)."""


@dataclass(slots=True)
class ForestAttention:
    """A forest as the layers need it, with masks that are made once for each window."""

    positions_T: torch.Tensor
    ends_T: torch.Tensor
    nodes: tuple[Node, ...]
    kind: AttentionKind
    masks: dict[int | None, Any] = field(default_factory=dict)
    """By window: segments, or a block mask (hence Any)."""

    @classmethod
    def of(cls, forest: Forest, kind: AttentionKind, device: torch.device) -> "ForestAttention":
        return cls(forest.positions_T.to(device), forest.ends_T.to(device), forest.nodes, kind)

    def get(self, window: int | None, make: Callable[["ForestAttention", int | None], Any]) -> Any:
        """The segments or the block mask of a window."""
        if window not in self.masks:
            self.masks[window] = make(self, window)
        return self.masks[window]


def flex_padding(num_tokens: int) -> int:
    """The number of tokens to add, so that all of FlexAttention's blocks are whole and there are at least two."""
    return max(MIN_FLEX_TOKENS - num_tokens, -num_tokens % FLEX_BLOCK)


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    forest: ForestAttention | None = None,
    **_: Any,  # Any: other arguments that models pass to their attention function
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: 1 x heads x T x D in, 1 x T x heads x D out.

    Raises:
        NotImplementedError: the model needs soft-capped scores, attention sinks or dropout, or does not pass its
            arguments down to its layers, so that there is no forest.
    """
    # `checking.py` catches this error in the model's first batch, and the model is trained without trees.
    if forest is None or softcap is not None or s_aux is not None or dropout:
        raise NotImplementedError(
            f"{type(module).__name__} needs attention that trees do not have: "
            f"forest={forest is not None}, softcap={softcap}, sinks={s_aux is not None}, dropout={dropout}"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if forest.kind == "segments":
        segments = forest.get(sliding_window, make_segments)
        size = value.shape[-1]
        if size != query.shape[-1]:  # latent attention
            query, key, value = _to_one_size(query, key, value)
        out = _SegmentAttention.apply(query, key, value, segments, scale)[..., :size]
    else:
        block_mask = forest.get(sliding_window, make_block_mask)
        out = _flex()(
            query,
            key,
            value,
            block_mask=block_mask,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return out.transpose(1, 2).contiguous(), None


# For an implementation without a mask function transformers makes no mask (5.19, masking_utils.py).
AttentionInterface.register(TREE_ATTENTION, tree_attention)


def mask_function(
    forest: ForestAttention, window: int | None
) -> Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]:
    """The forest's attention mask as FlexAttention's mask_mod."""
    positions_T, ends_T = forest.positions_T, forest.ends_T

    def sees(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        is_ancestor = (key <= query) & (query < ends_T[key])
        if window is None:
            return is_ancestor
        return is_ancestor & (positions_T[query] - positions_T[key] < window)

    return sees


def make_block_mask(forest: ForestAttention, window: int | None) -> Any:
    """The block mask: the blocks of keys that each block of queries attends to in part, and in whole.

    The forest's length is a multiple of FLEX_BLOCK. torch's own `create_block_mask` evaluates every pair of tokens (10
    bytes * T^2); here the ends and positions of each block give one number for each pair of blocks. Any: BlockMask is
    imported only on CUDA.
    """
    from torch.nn.attention.flex_attention import BlockMask

    ends_BT = forest.ends_T.view(-1, FLEX_BLOCK)
    positions_BT = forest.positions_T.view(-1, FLEX_BLOCK)
    num = len(ends_BT)
    first_B = torch.arange(num, device=ends_BT.device) * FLEX_BLOCK
    is_later = first_B[:, None] > first_B[None, :]  # queries by keys: the query block comes after the key block
    sees_BB = is_later & (ends_BT.amax(1)[None, :] > first_B[:, None])
    is_full_BB = is_later & (ends_BT.amin(1)[None, :] >= first_B[:, None] + FLEX_BLOCK)
    if window is not None:
        lowest_B, highest_B = positions_BT.amin(1), positions_BT.amax(1)
        sees_BB &= lowest_B[:, None] - highest_B[None, :] < window
        is_full_BB &= highest_B[:, None] - lowest_B[None, :] < window
    # A block on the diagonal is causal inside, so never full.
    is_partial_BB = (sees_BB & ~is_full_BB) | torch.eye(num, dtype=torch.bool, device=ends_BT.device)
    return BlockMask.from_kv_blocks(
        *_listed(is_partial_BB),
        *_listed(is_full_BB),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=mask_function(forest, window),
    )


def _listed(is_in_BB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each query block: the number of its key blocks (1 x 1 x B), and the indices of all blocks, its key blocks first
    (1 x 1 x B x B). int32."""
    order_BB = is_in_BB.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return is_in_BB.sum(1, dtype=torch.int32)[None, None], order_BB.to(torch.int32)[None, None]


def make_segments(forest: ForestAttention, window: int | None) -> list[Segment]:
    """Segments that contain each attended pair of query and key exactly once. The causal segments come first."""
    if window is None:
        own = [Segment(node.start, node.stop, node.start, node.stop, True) for node in forest.nodes]
        down = [
            Segment(node.stop, node.end, node.start, node.stop, False) for node in forest.nodes if node.end > node.stop
        ]
        return own + down
    positions = forest.positions_T.tolist()
    nodes = [part for node in forest.nodes for part in _split(node, window)]
    own = [Segment(node.start, node.stop, node.start, node.stop, True) for node in nodes]
    down: list[Segment] = []
    above: list[Node] = []
    for node in nodes:
        above = [ancestor for ancestor in above if node.start < ancestor.end]
        for ancestor in above:
            # The node's first token reaches back furthest.
            first = max(ancestor.start, ancestor.stop - (window - 1) + _distance(positions, ancestor, node) - 1)
            if first < ancestor.stop:
                down.append(_windowed(forest.positions_T, node, first, ancestor.stop, window))
        above.append(node)
    return own + down


def _split(node: Node, window: int) -> list[Node]:
    """The node in parts of at most `window` tokens, in which each token attends to all tokens before it."""
    starts = range(node.start, node.stop, window)
    return [Node(start, min(start + window, node.stop), node.end) for start in starts]


def _distance(positions: list[int], ancestor: Node, node: Node) -> int:
    """The distance from the ancestor's last token to the node's first token: 1 for a parent and its child."""
    return positions[node.start] - positions[ancestor.stop - 1]


def _windowed(positions_T: torch.Tensor, node: Node, key: int, key_stop: int, window: int) -> Segment:
    """The segment of an ancestor's keys [key, key_stop) and the node's tokens whose window reaches them."""
    reach = int(positions_T[key_stop - 1]) + window - int(positions_T[node.start])
    query_stop = min(node.stop, node.start + reach)
    queries, keys = positions_T[node.start : query_stop], positions_T[key:key_stop]
    is_hidden = queries[:, None] - keys[None, :] >= window
    mask = torch.zeros(is_hidden.shape).masked_fill_(is_hidden, HIDDEN) if is_hidden.any() else None
    return Segment(node.start, query_stop, key, key_stop, False, mask)


class _SegmentAttention(torch.autograd.Function):
    """Attention over segments, by torch's flash kernels for CPU.

    A query's softmax covers several segments. Forward joins their outputs, weighted by exp(log-sum-exp). Backward gives
    each segment's kernel the joined output and log-sum-exp, from which it computes exactly that segment's part of the
    gradient. Source: Dao et al. 2022, arXiv:2205.14135, algorithm 4 (the backward needs only output and log-sum-exp);
    Liu et al. 2023, arXiv:2310.01889 (joining blocks).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        segments: list[Segment],
        scale: float,
    ) -> torch.Tensor:
        _, num_heads, length, size = query.shape
        # The kernels' memory layout: 1 x T x heads, viewed as 1 x heads x T. Zeros, because no segment covers padding: a NaN
        # there would reach the weights' gradients.
        out = query.new_zeros(1, length, num_heads, size).transpose(1, 2)
        sums = query.new_empty(1, length, num_heads, dtype=torch.float32).transpose(1, 2)
        for segment in segments:
            # torch's public function does not return the log-sum-exps.
            part, part_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query[:, :, segment.query : segment.query_stop],
                key[:, :, segment.key : segment.key_stop],
                value[:, :, segment.key : segment.key_stop],
                0.0,
                segment.is_causal,
                attn_mask=_cast(segment.mask, query),
                scale=scale,
            )
            out_here = out[:, :, segment.query : segment.query_stop]
            sums_here = sums[:, :, segment.query : segment.query_stop]
            # Each query is in one causal segment, and these come first (`make_segments`): there is nothing to join yet.
            if segment.is_causal:
                out_here.copy_(part)
                sums_here.copy_(part_sums)
                continue
            joined = torch.logaddexp(sums_here, part_sums)
            weight = (sums_here - joined).exp_()[..., None].to(out.dtype)
            part_weight = (part_sums - joined).exp_()[..., None].to(out.dtype)
            out_here.mul_(weight).addcmul_(part, part_weight)
            sums_here.copy_(joined)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        (grad_out,) = gradients
        grads = tuple(
            torch.zeros((like.shape[0], like.shape[2], like.shape[1], like.shape[3]), dtype=like.dtype).transpose(1, 2)
            for like in (query, key, value)
        )
        for segment in ctx.segments:
            queries, keys = slice(segment.query, segment.query_stop), slice(segment.key, segment.key_stop)
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_out[:, :, queries],
                query[:, :, queries],
                key[:, :, keys],
                value[:, :, keys],
                out[:, :, queries],
                sums[:, :, queries],
                0.0,
                segment.is_causal,
                attn_mask=_cast(segment.mask, query),
                scale=ctx.scale,
            )
            for grad, part, where in zip(grads, parts, (queries, keys, keys), strict=True):
                grad[:, :, where].add_(part)
        return *grads, None, None


def _cast(mask: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    return None if mask is None else mask.to(like.dtype)


def _to_one_size(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors, their heads padded with zeros to the largest size: the kernels take only one size."""
    size = max(tensor.shape[-1] for tensor in tensors)
    return [torch.nn.functional.pad(tensor, (0, size - tensor.shape[-1])) for tensor in tensors]


_compiled_flex: list[Callable[..., torch.Tensor]] = []


def _flex() -> Callable[..., torch.Tensor]:
    """FlexAttention, compiled once for all lengths.

    With dynamic=False each new length would compile for seconds: https://github.com/unslothai/unsloth-zoo/pull/868.
    """
    if not _compiled_flex:
        import torch._dynamo
        from torch.nn.attention.flex_attention import flex_attention

        # A model with two windows, with and without gradient, needs eight graphs, torch's default limit. Above the
        # limit torch would silently fall back to computing all heads x T x T scores. It would do the same after an
        # error of the compiler if `suppress_errors` is set, and `import unsloth` sets it.
        torch._dynamo.config.recompile_limit = MAX_GRAPHS
        torch._dynamo.config.suppress_errors = False
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        _compiled_flex.append(torch.compile(flex_attention, dynamic=True))
    return _compiled_flex[0]
