"""The folders of a model. ART's servers and ours have the same layout.

`art_path` defaults to `.art` in the working directory, as for `LocalBackend` and `art-server`.
"""

# pyright: reportPrivateUsage=false

from pathlib import Path

from art_compat.models import Model


def get_default_art_path() -> str:
    return str(Path(".art").absolute())


def get_models_dir(project_name: str, art_path: str | None = None) -> str:
    return f"{art_path or get_default_art_path()}/{project_name}/models"


def get_model_dir(model: Model, art_path: str | None = None) -> str:
    return f"{get_models_dir(model.project, art_path)}/{model._storage_name}"


def get_output_dir_from_model_properties(project: str, name: str, art_path: str | None = None) -> str:
    return f"{get_models_dir(project, art_path)}/{name}"


def get_step_checkpoint_dir(model_output_dir: str, step: int) -> str:
    return f"{model_output_dir}/checkpoints/{step:04d}"


def get_trajectories_dir(model_output_dir: str) -> str:
    return f"{model_output_dir}/trajectories"


def get_trajectories_split_dir(model_output_dir: str, split: str) -> str:
    return f"{get_trajectories_dir(model_output_dir)}/{split}"
