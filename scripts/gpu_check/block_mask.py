"""The block mask built from intervals against torch's own."""

import functools
import random

import torch

from art_server.trainer.attention import ForestAttention, make_block_mask, mask_function
from art_server.trainer.tree import lay_out, pad_forest, sort_sequences
from gpu_check.machine import Cases, Line, Machine


def block_mask(machine: Machine) -> Cases:
    for tokens in (8192, 32_768, 131_072):
        yield f"{tokens} tokens", functools.partial(_block_mask, machine, tokens)


def _block_mask(machine: Machine, tokens: int) -> Line:
    from torch.nn.attention.flex_attention import create_block_mask

    tokens = 1024 if machine.is_toy else tokens
    rng = random.Random(0)
    prompt = [rng.randrange(100) for _ in range(tokens // 4)]
    rows = [prompt + [rng.randrange(100) for _ in range(tokens // 12)] for _ in range(9)]
    forest = lay_out(rows, sort_sequences(rows))
    forest = pad_forest(forest, -forest.num_tokens % 128)
    attention = ForestAttention.of(forest, "flex", machine.device)
    line: Line = {
        "seconds": machine.timed(lambda: make_block_mask(attention, None)),
        "peak_mib": machine.peak(lambda: make_block_mask(attention, None)) / 2**20,
    }
    is_equal = True
    if tokens <= 32_768:
        length = forest.num_tokens
        theirs = functools.partial(
            create_block_mask,
            mask_function(attention, None),
            None,
            None,
            length,
            length,
            machine.device,
        )
        line |= {
            "torch_seconds": machine.timed(theirs, 1),
            "torch_peak_mib": machine.peak(theirs) / 2**20,
        }
        is_equal = torch.equal(make_block_mask(attention, None).to_dense(), theirs().to_dense())
    return line | {"is_equal": is_equal, "ok": machine.ok(is_equal and line["seconds"] < 0.1)}
