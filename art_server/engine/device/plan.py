"""The memory plan of a GPU that engine and trainer share, and their handover: plain arithmetic, no GPU needed.

The cases differ in what leaves the card:

    handover    the engine gives up for a step      the trainer's base between steps
    none        nothing                             stays
    kv_cache    its KV cache                        stays, or leaves
    sleep       all but its graphs                  leaves

The first case in this order with room for long batches is chosen. If no case has, the case with the most room is. A trainer
with its own card needs no handover: nothing leaves.
"""

from dataclasses import dataclass
from typing import Literal

from art_server.engine.device.figures import MemoryFigures
from art_server.engine.device.model_size import ModelSize
from art_server.errors import InvalidInput
from art_server.settings import Handover

GIB = 2**30

CASES: tuple[tuple[Handover, bool], ...] = (
    ("none", True),
    ("kv_cache", True),
    ("kv_cache", False),
    ("sleep", False),
)
"""Handover, and whether the trainer's base stays on the card; the case with the cheapest step comes first."""

MAX_UTILIZATION = 0.92
"""vLLM's default of `gpu_memory_utilization`."""
MIN_KV_TOKENS = 8192
GOOD_KV_TOKENS = 65_536
"""With this many tokens of KV cache, dozens of rollouts run at a time."""
SEQUENCE_TOKENS = 4096
"""The longest sequence that must be trainable if `--max-seq-length` is not set."""
GOOD_TOKENS = 16_384
"""A micro-batch of this many tokens has room for the prefix tree of a group of rollouts."""
MAX_TOKENS = 32_768
"""Larger micro-batches are no faster."""
LARGE_CARD = 70 * GIB
MAX_SEQUENCES, MAX_SEQUENCES_LARGE = 256, 1024
"""vLLM's default of `max_num_seqs`, and its default on a large card."""
STATES, STATE_BYTES = 16, 4
"""The number of sequences for whose recurrent states a plan has room (vLLM runs fewer at a time when its cache is full), and the
bytes of a number in a state: files of such models ask for float32."""
SAMPLING_BYTES = 18
"""Bytes for each sequence and token of the vocabulary: logits in bfloat16 and float32, log-probabilities, probabilities, and the
random numbers that choose."""
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
class Line:
    """A row of the plan's table, in bytes."""

    what: str
    sampling: float
    training: float


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
    lines: tuple[Line, ...]
    num_shards: int = 1
    """Ranks that divide the trainer's base among them."""
    training_card: Card | None = None
    """The trainer's own card. If there is one, the table's second column is about this card."""
    trains: bool = True
    """False: no trainer works on this machine, and the numbers of a micro-batch are 0."""

    def used(self) -> tuple[float, float]:
        """Bytes on the card while sampling, and while training."""
        return sum(line.sampling for line in self.lines), sum(line.training for line in self.lines)

    def table(self, card: Card) -> str:
        """The plan for the log, in GiB."""
        own = self.training_card
        sampling, training = self.used()
        free = Line("free", card.total - sampling, (own or card).total - training)
        width = max(len(line.what) for line in self.lines)
        heads = ("serving", "trainer") if own else ("sampling", "training")
        rows = [f"{'GiB':{width}}  {heads[0]:>8}  {heads[1]:>8}"]
        for line in (*self.lines, free):
            rows.append(f"{line.what:{width}}  {line.sampling / GIB:8.1f}  {line.training / GIB:8.1f}")
        return "\n".join(
            [
                f"memory plan for {card.name}, {card.total / GIB:.1f} GiB ({self._turns()}):",
                *rows,
                f"main memory: {self.host / GIB:.1f} of {card.host / GIB:.1f} GiB{self._micro_batches()}",
            ]
        )

    def _micro_batches(self) -> str:
        if not self.trains:
            return ""
        return f"; tokens per micro-batch: {self.tokens:,}, {self.checkpointed_tokens:,} with gradient checkpointing"

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


def make_memory_plan(card: Card, demand: Demand, figures: MemoryFigures) -> MemoryPlan:
    """The first case of `CASES` with room for long batches; if no case has, the case with the most room.

    Raises:
        InvalidInput: no case fits; the message contains the numbers.
    """
    num_ranks = max(1, demand.num_ranks)
    wanted = {"auto": (1, num_ranks), "on": (num_ranks,), "off": (1,)}
    plans, fitting = list[MemoryPlan](), list[MemoryPlan]()
    for num in dict.fromkeys(wanted[demand.shard]):
        if not fitting:
            plans = [_make(card, demand, figures, *case, num) for case in _cases(demand, num)]
            fitting = [plan for plan in plans if not _missing(card, demand, plan)]
    if not fitting:
        raise _does_not_fit(card, demand, plans)
    comfortable = [plan for plan in fitting if _comfort(plan) >= 1]
    return comfortable[0] if comfortable else max(fitting, key=_comfort)


def _cases(demand: Demand, num_shards: int) -> tuple[tuple[Handover, bool], ...]:
    if demand.training_card or not demand.num_ranks:
        return CASES[:1]
    # Shards stay: main memory has no copy of shards, and all ranks together would have to read the base again.
    return tuple(case for case in CASES if demand.handover in (None, case[0]) and (case[1] or num_shards == 1))


@dataclass(frozen=True, slots=True)
class _Parts:
    """Bytes that the parts of engine and trainer take; the engine's parts are for each of its cards."""

    context: float
    """A process's CUDA context."""
    graphs: float
    engine_weights: float
    slots: float
    batch: float
    """The engine's largest batch, with the numbers of sampling."""
    states: float
    base: float
    """The trainer's base weights."""
    adapter: float
    """The adapter's weights."""
    trainer: float
    """Everything that the trainer holds during a step, except activations."""
    per_token: float
    """Activations of a token, without gradient checkpointing."""
    checkpointed: float
    """Activations of a token with gradient checkpointing: each layer's input, and all activations of one layer at a time."""

    @property
    def engine(self) -> float:
        """The engine's share without its KV cache and recurrent states."""
        return self.graphs + self.engine_weights + self.slots + self.batch


def _parts(card: Card, demand: Demand, figures: MemoryFigures, num_shards: int) -> _Parts:
    size = demand.size
    adapter = size.lora_width * demand.lora_rank
    base = size.weights(demand.trainer_itemsize)
    if num_shards > 1:
        # Embedding and head stay whole, and one layer at a time is gathered.
        whole = min(base, 2 * size.vocabulary * size.hidden * demand.trainer_itemsize)
        layers = base - whole
        base = whole + layers / num_shards + layers / size.num_layers
    # vLLM keeps sampling's numbers for each sequence and token of the vocabulary, and counts its graphs in its share.
    max_sequences = MAX_SEQUENCES_LARGE if card.total >= LARGE_CARD else MAX_SEQUENCES
    sampling = max_sequences * size.vocabulary * SAMPLING_BYTES
    layer = figures.hidden_factor * size.hidden + figures.intermediate_factor * size.intermediate
    return _Parts(
        context=figures.context_gib * GIB,
        graphs=figures.graphs_gib * GIB,
        engine_weights=size.weights(demand.engine_itemsize) / demand.num_serving,
        slots=adapter * demand.max_loras * demand.engine_itemsize / demand.num_serving,
        batch=max(figures.engine_step_gib * GIB, sampling),
        states=STATES * size.state_per_sequence * STATE_BYTES / demand.num_serving,
        base=base,
        adapter=adapter * 4,
        trainer=base + adapter * LORA_NUMBERS * 4 + (figures.head_gib + figures.reserve_gib) * GIB,
        per_token=layer * size.num_layers * demand.trainer_itemsize,
        checkpointed=(size.num_layers * size.hidden + layer) * demand.trainer_itemsize,
    )


def _make(
    card: Card, demand: Demand, figures: MemoryFigures, handover: Handover, is_resident: bool, num_shards: int
) -> MemoryPlan:
    parts, own = _parts(card, demand, figures, num_shards), demand.training_card
    utilization = demand.utilization
    if utilization is None:
        utilization = _utilization(card, demand, parts, handover, is_resident)
    kv = utilization * card.total - parts.engine - parts.states
    if own is not None:
        room = own.total - parts.context - parts.trainer
    else:
        kept = {"none": parts.engine + parts.states + kv, "kv_cache": parts.engine, "sleep": parts.graphs}[handover]
        room = card.total - 2 * parts.context - kept - parts.trainer if demand.num_ranks else 0.0
    tokens = max(0, min(MAX_TOKENS, int(room / parts.per_token)))
    checkpointed_tokens = max(0, int(room / parts.checkpointed))
    activations = max(tokens * parts.per_token, min(checkpointed_tokens, MAX_TOKENS) * parts.checkpointed)

    host = figures.process_gib * GIB
    if handover == "sleep":
        # Each of the engine's cards has a process, which copies its share to the same main memory.
        host += (parts.engine_weights + parts.slots) * demand.num_serving * demand.num_engines * LOCKED_SHARE
    # bitsandbytes keeps parts of quantised weights where a copy does not reach them.
    is_movable = not is_resident and not demand.size.quantized_bytes
    has_copy = is_movable and host + parts.base <= HOST_SHARE * card.host
    if has_copy:
        host += parts.base
    return MemoryPlan(
        handover=handover,
        is_base_resident=is_resident,
        has_host_copy=has_copy,
        utilization=utilization,
        kv_tokens=_tokens(kv, demand),
        tokens=tokens,
        checkpointed_tokens=checkpointed_tokens,
        host=host,
        lines=_lines(demand, parts, handover, is_resident, kv, activations),
        num_shards=num_shards,
        training_card=own,
        trains=demand.num_ranks > 0,
    )


def _utilization(card: Card, demand: Demand, parts: _Parts, handover: Handover, is_resident: bool) -> float:
    """vLLM's share of the card: the memory that processes and trainer leave."""
    if demand.training_card is not None or not demand.num_ranks:
        contexts, between = parts.context, 0.0
    elif handover == "none":
        contexts = 2 * parts.context
        # Room for long batches, or up to half of the rest: gradient checkpointing takes a third of the time.
        half = (card.total - contexts - parts.engine - parts.trainer) / 2
        long = max(GOOD_TOKENS, demand.row_tokens) * parts.checkpointed
        between = parts.trainer + max(long, min(half, MAX_TOKENS * parts.per_token))
    else:
        contexts = 2 * parts.context
        between = parts.base + parts.adapter if is_resident else 0.0
    utilization = min(MAX_UTILIZATION, (card.total - contexts - between) / card.total)
    return max(0.0, int(utilization * 1000) / 1000)


def _lines(
    demand: Demand, parts: _Parts, handover: Handover, is_resident: bool, kv: float, activations: float
) -> tuple[Line, ...]:
    """The plan's table. If the trainer has its own card, neither trainer nor engine takes anything from the other's card."""
    is_shared = demand.training_card is None
    has_cache, has_weights = handover == "none", handover != "sleep"

    def engine(name: str, num_bytes: float, stays: bool) -> Line:
        return Line(f"engine: {name}", num_bytes, num_bytes if stays and is_shared else 0.0)

    lines = [
        engine("context, CUDA graphs", parts.context + parts.graphs, True),
        engine("weights", parts.engine_weights, has_weights),
        engine("LoRA slots", parts.slots, has_weights),
        engine("largest batch", parts.batch, has_weights),
        engine(f"KV cache, {_tokens(kv, demand):,} tokens", max(kv, 0.0), has_cache),
    ]
    if parts.states:
        lines.append(engine(f"recurrent states, {STATES} sequences", parts.states, has_cache))
    if not demand.num_ranks:
        return tuple(lines)
    stays = is_resident and is_shared
    lines += [
        Line("trainer: context", parts.context if is_shared else 0.0, parts.context),
        Line("trainer: base weights", parts.base if stays else 0.0, parts.base),
        Line("trainer: adapter, gradients, optimizer", parts.adapter if stays else 0.0, parts.trainer - parts.base),
        Line("trainer: activations", 0.0, activations),
    ]
    return tuple(lines)


def _tokens(kv: float, demand: Demand) -> int:
    # A head of keys and values is on one card, so cards beyond the number of heads have copies of heads.
    num_shares = min(demand.num_serving, demand.size.kv_heads)
    per_token = demand.size.kv_per_token * demand.engine_itemsize / num_shares
    if not per_token:  # recurrent layers alone, which keep nothing for a token
        return max(GOOD_KV_TOKENS, demand.kv_tokens) if kv >= 0 else 0
    return max(0, int(kv / per_token))


def _comfort(plan: MemoryPlan) -> float:
    return min(plan.kv_tokens / GOOD_KV_TOKENS, plan.checkpointed_tokens / GOOD_TOKENS, 1.0)


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


def _does_not_fit(card: Card, demand: Demand, plans: list[MemoryPlan]) -> InvalidInput:
    reasons = [reason for plan in plans[-1:] for reason in _missing(card, demand, plan)]
    weights = demand.size.weights(demand.engine_itemsize) / GIB
    is_whole = demand.shard == "off" and demand.num_ranks > 1
    return InvalidInput(
        f"base model '{demand.base_model}' ({weights:.1f} GiB of weights) does not fit {card.name} with "
        f"{card.total / GIB:.1f} GiB: {'; '.join(reasons)}. Use a smaller base model or a 4-bit one, a lower "
        f"--max-lora-rank, a shorter --max-seq-length, {'--shard auto, ' if is_whole else ''}or a larger card",
        code="does_not_fit",
        param="base_model",
    )
