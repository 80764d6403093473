"""A model's folder in a bucket, at BUCKET/[PREFIX/]PROJECT/models/NAME, as ART puts it. Needs fsspec (extra `s3`)."""

import asyncio
import importlib
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from art.compat.buckets import address_of
from art.model import Model
from art.utils.output_dirs import get_model_dir


async def pull_model_from_s3(
    model_name: str,
    project: str,
    step: int | None = None,
    s3_bucket: str | None = None,
    prefix: str | None = None,
    verbose: bool = False,
    delete: bool = False,
    art_path: str | None = None,
    exclude: Iterable[str] | None = None,
) -> str:
    """Copies the folder, or the checkpoint of a step, from the bucket to this machine, where `load_trajectories` and `art
    import` read it, and returns the model's folder. `exclude` has names of folders, such as "checkpoints". With `delete`
    the folder here is emptied first. `verbose` prints each file. `s3_bucket` defaults to BACKUP_BUCKET.

    Raises:
        ValueError: no bucket is named.
    """
    model = Model(name=model_name, project=project)
    checkpoints = address_of(model, s3_bucket, prefix)
    if checkpoints is None:
        raise ValueError("pull_model_from_s3: pass s3_bucket, or set BACKUP_BUCKET")
    address = checkpoints.removesuffix("/checkpoints")
    folder = Path(get_model_dir(model, art_path))
    if delete:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    part = "" if step is None else f"checkpoints/{step:04d}/"
    await asyncio.to_thread(_copy, address, folder, part, {*(exclude or ()), ".."}, verbose)
    return str(folder)


def _copy(address: str, folder: Path, part: str, exclude: set[str], verbose: bool) -> None:
    fsspec: Any = importlib.import_module("fsspec")  # a package of the program
    files, root = fsspec.url_to_fs(address)
    for source in files.find(f"{root}/{part}"):
        name = source.removeprefix(root).strip("/")
        if not exclude & set(Path(name).parts[:-1]):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            files.get_file(source, str(folder / name))
            if verbose:
                print(name)
