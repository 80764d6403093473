"""Memory figures of processes and steps, which no formula gives. scripts/gpu-check measures them and writes
`figures.json`."""

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict

FILE = Path(__file__).with_name("figures.json")


class MemoryFigures(BaseModel):
    """Measured figures, in GiB of GPU memory unless noted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    context_gib: float
    """A process's CUDA context."""
    graphs_gib: float
    """vLLM's CUDA graphs and the memory of its libraries: inside vLLM's share of the card, and not released in sleep."""
    engine_step_gib: float
    """Activations of vLLM's largest batch: inside vLLM's share, cached by torch, released in sleep only."""
    head_gib: float
    """Logits of one chunk of the output head: 2^27 numbers in bfloat16, and in float32 three times."""
    reserve_gib: float
    """Memory that torch's allocator loses by splitting blocks."""
    process_gib: float
    """Main memory of server, vLLM and trainer together, without weights."""
    hidden_factor: float
    """Numbers that a layer keeps for backward, for each token and unit of its hidden width."""
    intermediate_factor: float
    """Numbers that a layer keeps for backward, for each token and unit of its inner width."""


def read_figures() -> MemoryFigures:
    return MemoryFigures.model_validate(json.loads(FILE.read_text()))
