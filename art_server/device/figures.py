"""What processes and steps take on a GPU that cannot be computed. `figures.json` holds it; scripts/gpu-check measures it
and writes it anew."""

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict

FILE = Path(__file__).with_name("figures.json")


class Figures(BaseModel):
    """GiB, unless said otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    context_gib: float
    """A process's CUDA context."""
    graphs_gib: float
    """vLLM's CUDA graphs and what its libraries hold: outside its share of the card, and kept in sleep."""
    engine_step_gib: float
    """Activations of vLLM's largest batch: inside its share, cached by torch, given up in sleep only."""
    head_gib: float
    """Logits of a chunk of the output head, with their gradient."""
    reserve_gib: float
    """What torch's allocator loses by splitting blocks."""
    process_gib: float
    """Main memory of server, vLLM and trainer together, without weights."""
    hidden_factor: float
    """A layer keeps so many numbers per unit of its width for each token until backward,"""
    intermediate_factor: float
    """and so many per unit of its inner width."""


def read_figures() -> Figures:
    return Figures.model_validate(json.loads(FILE.read_text()))
