"""`get_repo_root_path`: the folder in which ART keeps `.art`."""

from pathlib import Path


def get_repo_root_path() -> str:
    """The root of the git repository that contains the working directory, or else the working directory."""
    here = Path.cwd()
    return str(next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here))
