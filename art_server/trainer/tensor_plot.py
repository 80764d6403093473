"""A picture of the packed trees of a step: their tokens, the trained ones, and the attention mask."""

from pathlib import Path

import matplotlib
import torch

from art_server.trainer.attention import ForestAttention, mask_function
from art_server.trainer.batches import MicroBatch, TrainSequence

matplotlib.use("Agg")

MAX_DRAWN = 4
"""Micro-batches in a picture: the first ones, which have the largest trees."""

MAX_PIXELS = 1500
"""Largest width of a drawn mask. Of a larger mask only every n-th token is drawn."""

PLOT_FILE = "tensors.png"


def plot_micro_batches(micro_batches: list[MicroBatch], sequences: list[TrainSequence], folder: Path) -> Path:
    """Writes FOLDER/tensors.png: depth, predicting positions and attention mask of each micro-batch."""
    # Imported here, because the backend has to be chosen before this import.
    from matplotlib.figure import Figure

    drawn = micro_batches[:MAX_DRAWN]
    figure = Figure(figsize=(7 * len(drawn), 9), layout="constrained")
    axes = figure.subplots(2, len(drawn), squeeze=False, height_ratios=[1, 3])
    for column, batch in enumerate(drawn):
        forest = batch.forest
        above, below = axes[0][column], axes[1][column]
        above.plot(forest.positions_T.numpy(), linewidth=0.8, color="0.4")
        indices = batch.forest_indices_N.numpy()
        above.plot(indices, forest.positions_T.numpy()[indices], ".", markersize=2, color="tab:red")
        above.set_title(
            f"{batch.num_tokens} tokens for {batch.num_sequence_tokens} in {len(batch.sequences)} of {len(sequences)} sequences",
            fontsize=9,
        )
        above.set_ylabel("depth (red: predicts a trained token)", fontsize=8)
        sees = mask_function(ForestAttention.of(forest, "flex", torch.device("cpu")), None)
        shown = torch.arange(0, forest.num_tokens, -(-forest.num_tokens // MAX_PIXELS))
        mask = sees(None, None, shown[:, None], shown[None, :])
        below.imshow(mask.numpy(), cmap="Greys", interpolation="nearest", aspect="auto")
        below.set_xlabel("key", fontsize=8)
        below.set_ylabel("query", fontsize=8)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / PLOT_FILE, dpi=100)
    return folder / PLOT_FILE
