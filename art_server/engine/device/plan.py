"""The memory plan of a GPU that engine and trainer share, and their handover: plain arithmetic, no GPU needed.

Two rules. If engine and trainer both fit, with room for rollouts and long batches, nothing leaves the card (handover `none`).
Else one of them sleeps (`sleep`): during a step the engine keeps only its CUDA graphs on the card, and between steps the
trainer's base is in main memory, or only in the model's files. A trainer with its own card needs no handover.

The numbers below are upper bounds: a measured step takes 0.5 to 0.9 of them (docs/benchmarks.md). A step that runs out of
memory all the same is repeated with half the tokens (`trainer/token_budget.py`).
"""

from dataclasses import dataclass
from typing import Literal

from art_server.engine.device.model_size import ModelSize
from art_server.errors import InvalidInput
from art_server.settings import Handover

GIB = 2**30

MAX_UTILIZATION = 0.92
"""vLLM's default of `gpu_memory_utilization`."""
MIN_KV_TOKENS = 8192
GOOD_KV_TOKENS = 16_384
"""With this many tokens of KV cache, a group of sixteen rollouts of a thousand tokens runs at a time."""
SEQUENCE_TOKENS = 4096
"""The longest sequence that must be trainable if `--max-seq-length` is not set."""
GOOD_TOKENS = 8192
"""A micro-batch of this many tokens has room for the prefix tree of a group of rollouts."""
MAX_TOKENS = 32_768
"""Larger micro-batches are no faster."""
CONTEXT = GIB / 2
"""A process's CUDA context."""
GRAPHS = GIB
"""vLLM's CUDA graphs and the memory of its libraries: inside vLLM's share of the card, and not released in sleep."""
LARGE_CARD = 70 * GIB
ENGINE_BATCH, ENGINE_BATCH_LARGE = 1.5 * GIB, 2.5 * GIB
"""vLLM's largest batch, with the numbers of sampling, inside vLLM's share: 256 sequences at a time, and 1,024 on a large card.
vLLM measures the batch itself when it starts."""
TRAINER_STEP = 2.25 * GIB
"""Logits of one chunk of the output head, and what torch's allocator loses by splitting blocks."""
PROCESSES = 4 * GIB
"""Main memory of server, vLLM and trainer together, without weights."""
HIDDEN_FACTOR, INTERMEDIATE_FACTOR = 28, 8
"""Numbers that a layer keeps for backward, for each token and unit of its hidden and of its inner width."""
STATES, STATE_BYTES = 16, 4
"""The number of sequences for whose recurrent states a plan has room (vLLM runs fewer at a time when its cache is full), and the
bytes of a number in a state: files of such models ask for float32."""
LOCKED_SHARE = 1.5
"""Size of vLLM's copies of sleeping weights, as a multiple of the weights: each block of locked memory is rounded up to a power
of two."""
LORA_NUMBERS = 4
"""Numbers that a step keeps for each parameter of the adapter: weight, gradient and two moments of Adam, all float32."""
HOST_SHARE = 0.9
"""Share of main memory that a plan may use; the rest is for the system."""


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU and the machine around it, in bytes."""

    name: str
    total: int
    host: int


@dataclass(frozen=True, slots=True)
class Demand:
    """What a plan must have room for."""

    base_model: str
    size: ModelSize
    engine_itemsize: float
    """Bytes of one of the engine's weights."""
    trainer_itemsize: float
    lora_rank: int
    max_loras: int
    max_seq_length: int | None = None
    """The requested context length; None: as many tokens as the engine's KV cache holds."""
    utilization: float | None = None
    """The requested `gpu_memory_utilization`; None: the plan chooses."""
    handover: Handover | None = None
    """The requested handover; None: the plan chooses."""
    num_serving: int = 1
    """Cards that share the engine's weights and cache (tensor parallel)."""
    num_engines: int = 1
    """Engines of this machine, each with cards of its own."""
    training_card: Card | None = None
    """The trainer's own card, of the first rank; None: the trainer shares the engine's first card."""
    num_ranks: int = 1
    """Cards on which the trainer works, each with a process. 0: the trainer works on other machines, and takes nothing
    here."""
    shard: Literal["auto", "on", "off"] = "auto"
    """Whether the ranks divide the trainer's base among them; auto: if the base does not fit otherwise."""

    @property
    def row_tokens(self) -> int:
        longest = self.max_seq_length or SEQUENCE_TOKENS
        return min(longest, self.size.max_positions)

    @property
    def kv_tokens(self) -> int:
        return max(min(MIN_KV_TOKENS, self.size.max_positions), self.row_tokens)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How engine and trainer share the card."""

    handover: Handover
    is_base_resident: bool
    """Whether the trainer's base stays on the device between steps."""
    has_host_copy: bool
    """Whether a base that leaves is kept in main memory; otherwise the base is read again from its files."""
    utilization: float
    """vLLM's `gpu_memory_utilization`."""
    kv_tokens: int
    tokens: int
    """Tokens per micro-batch without gradient checkpointing; 0 if checkpointing is always needed."""
    checkpointed_tokens: int
    """Tokens per micro-batch with gradient checkpointing."""
    host: float
    """Bytes of main memory that weights and processes take."""
    num_shards: int = 1
    """Ranks that divide the trainer's base among them."""
    training_card: Card | None = None
    """The trainer's own card."""
    trains: bool = True
    """False: no trainer works on this machine, and the numbers of a micro-batch are 0."""

    @property
    def is_roomy(self) -> bool:
        """Whether there is room for rollouts and long batches."""
        return self.kv_tokens >= GOOD_KV_TOKENS and self.checkpointed_tokens >= GOOD_TOKENS

    def summary(self, card: Card) -> str:
        """The plan for the log."""
        parts = [
            f"memory plan for {card.name}, {card.total / GIB:.1f} GiB ({self._turns()}): the engine's share is "
            f"{self.utilization * card.total / GIB:.1f} GiB, {self.kv_tokens:,} tokens of KV cache",
            f"main memory: {self.host / GIB:.1f} of {card.host / GIB:.1f} GiB",
        ]
        if self.trains:
            parts.append(
                f"tokens per micro-batch: {self.tokens:,}, {self.checkpointed_tokens:,} with gradient checkpointing"
            )
        return "; ".join(parts)

    def _turns(self) -> str:
        """How engine and trainer share the card."""
        if self.training_card is not None:
            return f"the trainer has {self.training_card.name}, {self.training_card.total / GIB:.1f} GiB, to itself"
        if not self.trains:
            return "the trainer works on other machines"
        base = "stays"
        if not self.is_base_resident:
            base = "leaves the card between steps"
            if not self.has_host_copy:
                base += " and is read again"
        return f"handover: {self.handover}; the trainer's base {base}"


def make_memory_plan(card: Card, demand: Demand) -> MemoryPlan:
    """The plan without a handover if engine and trainer both fit with room to work, else the plan in which one sleeps.

    Raises:
        InvalidInput: neither plan fits; the message contains the numbers.
    """
    num_ranks = max(1, demand.num_ranks)
    shard_numbers = {"auto": (1, num_ranks), "on": (num_ranks,), "off": (1,)}[demand.shard]
    plans: list[MemoryPlan] = []
    for num_shards in dict.fromkeys(shard_numbers):
        plans = [_make(card, demand, handover, num_shards) for handover in _handovers(demand)]
        fitting = [plan for plan in plans if not _missing(card, demand, plan)]
        if fitting:
            return fitting[0] if fitting[0].is_roomy else fitting[-1]
    raise _does_not_fit(card, demand, plans[-1])


def _handovers(demand: Demand) -> tuple[Handover, ...]:
    if demand.training_card or not demand.num_ranks:
        return ("none",)
    return (demand.handover,) if demand.handover else ("none", "sleep")


@dataclass(frozen=True, slots=True)
class _Need:
    """Bytes that engine and trainer take whatever the handover is."""

    slots: float
    """The engine's LoRA slots, on all of its cards together."""
    engine: float
    """vLLM's share of one card, without its KV cache."""
    base: float
    """The trainer's base weights on one card."""
    trainer: float
    """Everything that the trainer holds on one card during a step, except activations."""
    per_token: float
    """Activations of a token, without gradient checkpointing."""
    checkpointed: float
    """Activations of a token with gradient checkpointing."""


def _need(card: Card, demand: Demand, num_shards: int) -> _Need:
    size = demand.size
    batch = ENGINE_BATCH_LARGE if card.total >= LARGE_CARD else ENGINE_BATCH
    adapter = size.lora_width * demand.lora_rank
    slots = adapter * demand.max_loras * demand.engine_itemsize
    shared = size.weights(demand.engine_itemsize) + slots + STATES * size.state_per_sequence * STATE_BYTES
    base = size.weights(demand.trainer_itemsize)
    if num_shards > 1:
        # Embedding and head stay whole, and one layer at a time is gathered.
        whole = min(base, 2 * size.vocabulary * size.hidden * demand.trainer_itemsize)
        layers = base - whole
        base = whole + layers / num_shards + layers / size.num_layers
    per_token, checkpointed = activation_bytes(size.num_layers, size.hidden, size.intermediate, demand.trainer_itemsize)
    return _Need(
        slots=slots,
        engine=GRAPHS + batch + shared / demand.num_serving,
        base=base,
        trainer=base + adapter * LORA_NUMBERS * 4 + TRAINER_STEP,
        per_token=per_token,
        checkpointed=checkpointed,
    )


def activation_bytes(num_layers: int, hidden: int, intermediate: int, itemsize: float) -> tuple[float, float]:
    """Bytes of a token's activations in a step: without gradient checkpointing, and with it, when a step keeps the input of
    each layer, and all activations of one layer at a time."""
    layer = HIDDEN_FACTOR * hidden + INTERMEDIATE_FACTOR * intermediate
    return layer * num_layers * itemsize, (num_layers * hidden + layer) * itemsize


def _make(card: Card, demand: Demand, handover: Handover, num_shards: int) -> MemoryPlan:
    need, own = _need(card, demand, num_shards), demand.training_card
    # Shards stay: main memory has no copy of shards, and all ranks together would have to read the base again.
    is_resident = handover == "none" or num_shards > 1
    utilization = demand.utilization
    if utilization is None:
        utilization = _utilization(card, demand, need, handover, is_resident)
    share = utilization * card.total
    room = 0.0
    if own is not None:
        room = own.total - CONTEXT - need.trainer
    elif demand.num_ranks:
        room = card.total - 2 * CONTEXT - (share if handover == "none" else GRAPHS) - need.trainer

    host = float(PROCESSES)
    if handover == "sleep":
        # Each of the engine's cards has a process, which copies its share to the same main memory.
        host += (demand.size.weights(demand.engine_itemsize) + need.slots) * demand.num_engines * LOCKED_SHARE
    # bitsandbytes keeps parts of quantised weights where a copy does not reach them.
    is_movable = not is_resident and not demand.size.quantized_bytes
    has_copy = is_movable and host + need.base <= HOST_SHARE * card.host
    if has_copy:
        host += need.base
    return MemoryPlan(
        handover=handover,
        is_base_resident=is_resident,
        has_host_copy=has_copy,
        utilization=utilization,
        kv_tokens=_tokens(share - need.engine, demand),
        tokens=max(0, min(MAX_TOKENS, int(room / need.per_token))),
        checkpointed_tokens=max(0, int(room / need.checkpointed)),
        host=host,
        num_shards=num_shards,
        training_card=own,
        trains=demand.num_ranks > 0,
    )


def _utilization(card: Card, demand: Demand, need: _Need, handover: Handover, is_resident: bool) -> float:
    """vLLM's share of the card: what processes and trainer leave."""
    taken = CONTEXT
    if demand.training_card is None and demand.num_ranks:
        taken += CONTEXT
        if handover == "none":
            # KV cache and activations get half of the rest, unless one sequence takes more, or the largest micro-batch less.
            half = (card.total - taken - need.engine - need.trainer) / 2
            longest = demand.row_tokens * need.checkpointed
            taken += need.trainer + max(longest, min(half, MAX_TOKENS * need.per_token))
        elif is_resident:
            taken += need.trainer
    utilization = min(MAX_UTILIZATION, (card.total - taken) / card.total)
    # Rounded down: vLLM does not start if less memory is free than its share (`failures.py`).
    return max(0.0, int(utilization * 1000) / 1000)


def _tokens(kv: float, demand: Demand) -> int:
    # A head of keys and values is on one card, so cards beyond the number of heads have copies of heads.
    num_shares = min(demand.num_serving, demand.size.kv_heads)
    per_token = demand.size.kv_per_token * demand.engine_itemsize / num_shares
    if not per_token:  # recurrent layers alone, which keep nothing for a token
        return max(GOOD_KV_TOKENS, demand.kv_tokens) if kv >= 0 else 0
    return max(0, int(kv / per_token))


def _missing(card: Card, demand: Demand, plan: MemoryPlan) -> list[str]:
    """Reasons why a plan does not fit, with numbers; empty if it fits."""
    missing: list[str] = []
    case = f"handover {plan.handover}"
    if plan.kv_tokens < demand.kv_tokens:
        missing.append(
            f"{case}: the engine's share of {plan.utilization * card.total / GIB:.1f} GiB leaves {plan.kv_tokens:,} "
            f"tokens of KV cache, and {demand.kv_tokens:,} are needed"
        )
    if plan.trains and plan.checkpointed_tokens < demand.row_tokens:
        missing.append(
            f"{case}: training has room for {plan.checkpointed_tokens:,} tokens at a time, and a sequence has {demand.row_tokens:,}"
        )
    if plan.host > HOST_SHARE * card.host:
        missing.append(f"{case}: it takes {plan.host / GIB:.0f} GiB of main memory, of {card.host / GIB:.0f}")
    return missing


def _does_not_fit(card: Card, demand: Demand, plan: MemoryPlan) -> InvalidInput:
    weights = demand.size.weights(demand.engine_itemsize) / GIB
    is_whole = demand.shard == "off" and demand.num_ranks > 1
    return InvalidInput(
        f"base model '{demand.base_model}' ({weights:.1f} GiB of weights) does not fit {card.name} with "
        f"{card.total / GIB:.1f} GiB: {'; '.join(_missing(card, demand, plan))}. Use a smaller base model or a 4-bit one, a lower "
        f"--max-lora-rank, a shorter --max-seq-length, {'--shard auto, ' if is_whole else ''}or a larger card",
        code="does_not_fit",
        param="base_model",
    )
