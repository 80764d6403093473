"""Cards and models, as the device's plan sees them. `.venv/bin/python -m tests.quick.engine.device.cards` prints the tables of
docs/gpu.md."""

from dataclasses import replace

from art_server.engine.device.model_size import ModelSize
from art_server.engine.device.plan import GIB, Card, Demand, make_memory_plan
from art_server.errors import InvalidInput


def size(billions: float, layers: int, hidden: int, inner: int, heads: int) -> ModelSize:
    """A Qwen3 of this shape: eight heads of keys and values, 128 wide."""
    query, kv = heads * 128, 8 * 128
    lora = layers * (2 * (hidden + query) + 2 * (hidden + kv) + 3 * (hidden + inner))
    measures = (int(billions * 1e9), layers, hidden, inner, layers * 2 * kv, lora, 40_960)
    return ModelSize(*measures, kv_heads=8, vocabulary=151_936)


SIZES = {
    "0.6B": size(0.75, 28, 1024, 3072, 16),
    "1.7B": size(2.03, 28, 2048, 6144, 16),
    "4B": size(4.02, 36, 2560, 9728, 32),
    "8B": size(8.19, 36, 4096, 12_288, 32),
    "14B": size(14.77, 40, 5120, 17_408, 40),
    "32B": size(32.76, 64, 5120, 25_600, 64),
}


CARDS = {"16 GB": 15.6, "24 GB": 23.6, "48 GB": 44.4, "80 GB": 79.1, "141 GB": 139.7}
"""Usable GiB of each card, with error correction on."""


CONTEXTS = {"32k": 32_768, "64k": 65_536, "128k": 131_072}
LONG_MODELS = ("4B", "8B", "14B", "32B")


def card(name: str, host_gib: float = 256) -> Card:
    return Card(name, int(CARDS[name] * GIB), int(host_gib * GIB))


def demand(name: str, max_seq_length: int | None = None) -> Demand:
    """With `max_seq_length`, of a model that takes so many positions."""
    long = replace(SIZES[name], max_positions=max(SIZES[name].max_positions, max_seq_length or 0))
    return Demand(name, long, 2, 2, lora_rank=16, max_loras=4, max_seq_length=max_seq_length)


def table() -> str:
    """Which model fits which card, and how: handover, tokens of KV cache, and tokens trained at a time with checkpointing."""
    lines = [f"| card | {' | '.join(SIZES)} |", "|---" * (len(SIZES) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(_cell(name, model) for model in SIZES)} |" for name in CARDS]
    return "\n".join(lines) + "\n"


def _cell(name: str, model: str) -> str:
    try:
        plan = make_memory_plan(card(name), demand(model))
    except InvalidInput:
        return "no"
    return f"{plan.handover}; {plan.kv_tokens // 1000}k; {plan.checkpointed_tokens // 1000}k"


def context_table() -> str:
    """Which contexts fit which card: handover, tokens of KV cache, and the conversations of full length that these hold."""
    names = [name for name in CARDS if name != "16 GB"]
    lines = [f"| model, context | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for model in LONG_MODELS:
        for context in CONTEXTS:
            cells = (_context_cell(name, model, context) for name in names)
            lines.append(f"| {model}, {context} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _context_cell(name: str, model: str, context: str) -> str:
    length = CONTEXTS[context]
    try:
        plan = make_memory_plan(card(name), demand(model, length))
    except InvalidInput:
        return "no"
    return f"{plan.handover}; {plan.kv_tokens // 1000}k; {plan.kv_tokens / length:.1f}"


if __name__ == "__main__":
    print(table())
    print(context_table(), end="")
