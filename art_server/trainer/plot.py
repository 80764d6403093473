"""A picture of the packed trees of a step: what is laid out once, what of it is trained, and who sees whom."""

from pathlib import Path

import matplotlib
import torch

from art_server.trainer.attention import ForestAttention, mask_function
from art_server.trainer.batches import MicroBatch, TrainRow

matplotlib.use("Agg")

MAX_DRAWN = 4
"""Micro-batches in a picture, the largest ones."""

MAX_PIXELS = 1500
"""A larger mask is drawn by every n-th token."""

PLOT_FILE = "tensors.png"


def plot_micro_batches(micro_batches: list[MicroBatch], rows: list[TrainRow], folder: Path) -> Path:
    """Write FOLDER/tensors.png: for each micro-batch depth, predicting places and attention mask."""
    # Here, because the backend is chosen above first.
    from matplotlib.figure import Figure

    drawn = micro_batches[:MAX_DRAWN]
    figure = Figure(figsize=(7 * len(drawn), 9), layout="constrained")
    axes = figure.subplots(2, len(drawn), squeeze=False, height_ratios=[1, 3])
    for column, batch in enumerate(drawn):
        forest = batch.forest
        above, below = axes[0][column], axes[1][column]
        above.plot(forest.positions_T.numpy(), linewidth=0.8, color="0.4")
        places = batch.places_N.numpy()
        above.plot(places, forest.positions_T.numpy()[places], ".", markersize=2, color="tab:red")
        above.set_title(
            f"{batch.num_tokens} tokens for {batch.num_row_tokens} in {len(batch.rows)} of {len(rows)} rows",
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
