"""A model's folder in a bucket, at BUCKET/[PREFIX/]PROJECT/models/NAME, as in ART. Needs fsspec (extra `s3`)."""

import asyncio
import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from art.utils.output_dirs import get_model_dir
from art_compat.buckets import address_of
from art_compat.models import Model


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
    import` read it, and returns the model's folder. `exclude` has names of folders, such as "checkpoints". With
    `delete`, files on this machine that the bucket lacks are deleted at the end. `verbose` prints each file. `s3_bucket`
    defaults to BACKUP_BUCKET.

    Raises:
        ValueError: no bucket is named.
        FileNotFoundError: the bucket holds no file of the model or step. Nothing is deleted.
    """
    model = Model(name=model_name, project=project)
    checkpoints = address_of(model, s3_bucket, prefix)
    if checkpoints is None:
        raise ValueError("pull_model_from_s3: pass s3_bucket, or set BACKUP_BUCKET")
    address = checkpoints.removesuffix("/checkpoints")
    folder = Path(get_model_dir(model, art_path))
    part = "" if step is None else f"checkpoints/{step:04d}/"
    excluded = {*(exclude or ()), ".."}  # "..": a name in the bucket cannot lead out of the folder
    copied = await asyncio.to_thread(_copy, address, folder, part, excluded, verbose)
    if not copied:
        raise FileNotFoundError(f"{address}/{part} holds no files")
    if delete:
        await asyncio.to_thread(_delete_others, folder, part, copied, excluded)
    return str(folder)


def _copy(address: str, folder: Path, part: str, exclude: set[str], verbose: bool) -> set[Path]:
    """Copies the files of a part of an address, and returns the paths of the copies."""
    copied = set[Path]()
    fsspec: Any = importlib.import_module("fsspec")  # a package of the program
    files, root = fsspec.url_to_fs(address)
    for source in files.find(f"{root}/{part}"):
        name = source.removeprefix(root).strip("/")
        if not exclude & set(Path(name).parts[:-1]):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            files.get_file(source, str(folder / name))
            copied.add(folder / name)
            if verbose:
                print(name)
    return copied


def _delete_others(folder: Path, part: str, kept: set[Path], exclude: set[str]) -> None:
    for file in (folder / part).rglob("*"):
        name = file.relative_to(folder)
        if file.is_file() and file not in kept and not exclude & set(name.parts[:-1]):
            file.unlink()
