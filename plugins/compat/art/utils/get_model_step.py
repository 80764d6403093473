"""`get_model_step`: a model's newest step on this machine's disk, without a server."""

from pathlib import Path

from art.utils.output_dirs import get_model_dir
from art_compat.models import TrainableModel


def get_model_step(model: TrainableModel, art_path: str | None = None) -> int:
    """The newest step under `art_path` (".art"); 0 if there is no step. `await model.get_step()` asks the server."""
    folder = Path(get_model_dir(model, art_path)) / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=0)
