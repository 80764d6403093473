"""`art export`, `art import`, `art copy`: move a checkpoint from a source to a target.

Sources and targets are a server's folder, a server's URL, a PEFT folder, and any address that fsspec opens. In between,
a checkpoint is a folder of files and a description with their digests (`art_server/store/archive.py`). A target gets the
complete checkpoint or none.
"""

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Never

from art_server.errors import Conflict, InvalidInput, NotFound, ServerError
from art_server.store import base_models, files
from art_server.store.adapter import read_lora
from art_server.store.archive import (
    MAX_CHECKPOINT_BYTES,
    MAX_DESCRIPTION_BYTES,
    Description,
    check_content,
    check_on_base,
    describe_step,
    place_checkpoint,
    read_description,
)
from art_server.store.base_models import check_trainable, find_base_model
from art_server.store.model_folder import (
    ADAPTER_FILE,
    DESCRIPTION_FILE,
    OPTIMIZER_FILE,
    ModelFolder,
    content_digests,
    copy_content,
    list_model_folders,
)
from art_server.store.registry import check_case, check_name
from art_transfer.export import push_folder, write_adapter, write_merged
from art_transfer.http_transfer import TransferClient, no_best_step
from art_watch.runs import Runs

OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"}
"""Schemes without folders. fsspec would create a missing bucket like a missing folder."""
MAX_STEP_DIGITS = 12
"""Length of the name of a checkpoint's folder in a folder of checkpoints."""


def export_model(flags: argparse.Namespace) -> None:
    target = flags.dir.absolute()
    clear_unfinished(target)
    clear_unfinished(target.parent)
    is_there = target.exists()
    if is_there and (not target.is_dir() or any(target.iterdir())):
        raise InvalidInput(f"{flags.dir} exists already: name a new folder", code="target_exists")
    # An empty folder stays: it may be a mount point or the current folder, which no rename replaces.
    write = write_merged if flags.merge else write_adapter
    with unfinished_folder(target if is_there else target.parent) as temporary:
        with opened_model(flags, flags.model) as (content, description):
            write(content, description, temporary)
        if is_there:
            for file in temporary.iterdir():
                os.rename(file, target / file.name)
        else:
            os.rename(temporary, target)
    print(f"{flags.model}, step {description.step}: {flags.dir}")
    if flags.push is not None:
        print(push_folder(flags.dir, flags.push))


UNFINISHED = ".*.art-export.tmp"
"""The names of folders that an export writes and has not finished."""


@contextlib.contextmanager
def unfinished_folder(parent: Path) -> Iterator[Path]:
    """A new folder, which is deleted at the end of the block unless it was renamed: also after SIGTERM and SIGHUP, which end the
    block with SystemExit. Its lock tells other exports that this process runs.

    Raises:
        InvalidInput: the folder cannot be made.
    """
    folder = parent / UNFINISHED.replace("*", uuid.uuid4().hex)
    handlers = {number: signal.signal(number, _exit) for number in (signal.SIGTERM, signal.SIGHUP)}
    descriptor: int | None = None
    try:
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise InvalidInput(
                f"{parent} cannot be made or written ({error.strerror}): name another folder", code="bad_target"
            ) from error
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _exit(number: int, _: object) -> Never:
    sys.exit(128 + number)


def clear_unfinished(parent: Path) -> None:
    """Deletes what exports that were killed have left in a folder."""
    for folder in parent.glob(UNFINISHED):
        with contextlib.suppress(OSError):  # BlockingIOError: that export still runs
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def import_folder(flags: argparse.Namespace) -> None:
    if not flags.dir.is_dir():
        raise InvalidInput(
            f"there is no folder {flags.dir}: name a folder with adapter_config.json and adapter_model.safetensors",
            code="unknown_folder",
        )
    with tempfile.TemporaryDirectory() as temporary:
        content = Path(temporary) / "content"
        copy_content(flags.dir, content)
        store_model(flags, flags.model, content, describe_folder(flags.dir, content, flags.base_model))


def copy_checkpoint(flags: argparse.Namespace) -> None:
    """Copies a checkpoint from a model to an address, or from an address to a model.

    Raises:
        InvalidInput: source and target are two models or two addresses, or --not-after is given for a model.
    """
    if ("://" in flags.source) == ("://" in flags.target):
        raise InvalidInput(
            "one of SOURCE and TARGET must be a model and the other an address with '://', such as s3://bucket/folder",
            code="bad_address",
        )
    if "://" in flags.target:
        if flags.not_after is not None:
            raise InvalidInput(
                "--not-after chooses among the checkpoints at an address: write MODEL@k for a model's step k",
                code="bad_address",
            )
        with (
            opened_model(flags, flags.source) as (content, description),
            address_errors(flags.target),
        ):
            write_address(flags.target, content, description)
        print(f"{flags.source}, step {description.step}: {flags.target}")
        return
    with tempfile.TemporaryDirectory() as temporary:
        with address_errors(flags.source):
            description = read_address(flags.source, Path(temporary), flags.not_after)
        store_model(flags, flags.target, Path(temporary), description)


# --- models -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened_model(flags: argparse.Namespace, text: str) -> Iterator[tuple[Path, Description]]:
    """Yields folder and description of the checkpoint [PROJECT/]NAME[@k] (k is a number, best or
    latest), from a running server or from a server's folder.

    Raises:
        InvalidInput: there is no such model, or its files are damaged.
    """
    path, _, step = text.partition("@")
    project, _, name = path.rpartition("/")
    if step not in ("", "best", "latest") and not (step.isascii() and step.isdecimal()):
        raise InvalidInput(f"'{step}' is not a step: write {path}@NUMBER, @best or @latest", code="unknown_step")
    step = "" if step == "latest" else step
    if flags.url is not None:
        with TransferClient(flags.url) as server, tempfile.TemporaryDirectory() as temporary:
            content = Path(temporary) / "content"
            yield content, server.download(project, name, step, content)
        return
    folder = find_model_folder(flags.path, project, name)
    if step == "best":
        best = Runs(flags.path).history(folder).best_step()
        if best is None:
            raise InvalidInput(no_best_step(path), code="unknown_step")
        number = best
    else:
        number = int(step) if step else folder.newest_step() or 0
    description = describe_step(folder, folder.read(), number)
    check_content(folder.checkpoint_dir(number), description)
    yield folder.checkpoint_dir(number), description


def find_model_folder(root: Path, project: str, name: str) -> ModelFolder:
    folders = list_model_folders(root.absolute())
    matches = [folder for folder in folders if folder.name == name and project in ("", folder.project)]
    if len(matches) != 1:
        known = ", ".join(f"{folder.project}/{folder.name}" for folder in matches or folders) or "none"
        model = f"{project}/{name}" if project else name
        problem = "one of several models" if matches else "no model"
        raise InvalidInput(
            f"'{model}' is {problem} in {root}; "
            f"models: {known}. Write PROJECT/NAME, and name the server's folder with --path or a server with --url",
            code="unknown_model",
        )
    return matches[0]


def store_model(flags: argparse.Namespace, text: str, content: Path, description: Description) -> None:
    """Stores a checkpoint as PROJECT/NAME, on a running server or in the folder of a stopped server."""
    project, slash, name = text.partition("/")
    if not slash:
        raise InvalidInput(f"'{text}' names no project: write PROJECT/NAME", code="bad_name", param="model")
    folder = ModelFolder(flags.path.absolute(), check_name(project, "project"), check_name(name, "name"))
    check_content(content, description)
    if flags.url is not None:
        with TransferClient(flags.url) as server:
            server.upload(project, name, content, description)
    else:
        store_in_folder(flags.path, folder, content, description)
    print(f"{text}: step {description.step}, on {description.base_model}")


def store_in_folder(root: Path, folder: ModelFolder, content: Path, description: Description) -> None:
    # Imported here, because the server's parts take seconds to load.
    from art_server.settings import ServerConfig

    check_case(list_model_folders(root.absolute()), folder)
    base = find_base_model(description.base_model, base_models.CACHE_DIR, needs_weights=False)
    check_trainable(base)
    known = folder.read().lora if folder.exists() else None
    description = check_on_base(description, base, content, known)
    config = ServerConfig(path=root)
    try:
        lock = files.lock_folder(config.server_dir, root)
    except Conflict as error:
        raise Conflict(f"an art-server works in {root}: pass its address with --url", code=error.code) from error
    files.keep_private(root)
    ready = config.server_dir / "incoming" / uuid.uuid4().hex
    try:
        copy_content(content, ready)
        place_checkpoint(folder, description, ready, config.log_dir / "engine.log")
    finally:
        shutil.rmtree(ready, ignore_errors=True)
        os.close(lock)


def describe_folder(source: Path, content: Path, base_model: str | None) -> Description:
    """Describes a PEFT folder as the checkpoint of a step: the step in the folder's checkpoint.json, else step 0.

    Raises:
        InvalidInput: the folder holds no plain LoRA adapter in safetensors, or no base model is named.
    """
    lora, named = read_lora(content)
    if not (content / ADAPTER_FILE).exists():
        raise InvalidInput(
            f"{source} has no {ADAPTER_FILE}: save the adapter with safe_serialization=True",
            code="bad_adapter",
        )
    base = base_model or ("smollm2" if named == base_models.SMOLLM2_ID else named)  # `export.public_name`
    if base is None:
        raise InvalidInput("the adapter names no base model: pass --base-model", code="unknown_base_model")
    known: dict[str, Any] = {"step": 0}  # Any: arbitrary JSON; `read_description` checks it
    if (source / DESCRIPTION_FILE).exists():
        try:
            known = dict(json.loads((source / DESCRIPTION_FILE).read_bytes()))
        except (ValueError, TypeError) as error:
            raise InvalidInput(
                f"{source / DESCRIPTION_FILE} cannot be read: {error}", code="broken_checkpoint"
            ) from error
    known["files"] = known.get("files") or content_digests(content)
    known.setdefault("lora", lora.model_dump())
    description = read_description(json.dumps(known | {"base_model": base}).encode())
    if not (content / OPTIMIZER_FILE).exists():  # a server deletes the optimizer state of earlier steps
        description.files.pop(OPTIMIZER_FILE, None)
    return description


# --- addresses ----------------------------------------------------------------------------------------------------


def open_address(address: str) -> tuple[Any, str]:
    """Returns the file system of an address and the folder in the file system. Any: fsspec is untyped."""
    # Imported here, because only this command needs it.
    from fsspec.core import url_to_fs

    system, root = url_to_fs(address)
    return system, root.rstrip("/")


@contextlib.contextmanager
def address_errors(address: str) -> Iterator[None]:
    """Translates the exceptions of fsspec and of the packages below fsspec, which may be of any class.

    Raises:
        InvalidInput: the scheme is unknown, its package or the credentials are missing, or the store failed.
    """
    try:
        yield
    except ServerError:
        raise
    except Exception as error:
        raise InvalidInput(
            f"{address} cannot be used ({type(error).__name__}: {error}): write an address such as s3://bucket/folder or "
            "file:///folder",
            code="bad_address",
        ) from error


def write_address(address: str, content: Path, description: Description) -> None:
    """Writes a checkpoint to an address. Writes the description last: without it the files are no checkpoint.

    Raises:
        InvalidInput: the address holds another checkpoint.
    """
    system, root = open_address(address)
    data = description.model_dump_json(indent=2).encode()
    last = f"{root}/{DESCRIPTION_FILE}"
    if system.exists(last):
        if identity(read_description(system.cat_file(last))) == identity(description):
            return
        raise InvalidInput(f"{address} holds another checkpoint: name another folder", code="target_exists")
    scheme = address.partition("://")[0]
    if scheme not in OBJECT_STORES:
        system.makedirs(root, exist_ok=True)
    for name in description.files:
        system.put_file(str(content / name), f"{root}/{name}")
    system.pipe_file(last, data)


def read_address(address: str, folder: Path, not_after: int | None = None) -> Description:
    """Downloads a checkpoint from an address into a folder and returns its description. Of several checkpoints,
    downloads the newest that is not after step `not_after`.

    Raises:
        NotFound: the address holds no complete checkpoint up to this step.
        InvalidInput: a file of the checkpoint is missing or damaged.
    """
    system, root = open_address(address)
    root = newest_in(system, root, address, not_after)
    try:
        check_size(system, f"{root}/{DESCRIPTION_FILE}", MAX_DESCRIPTION_BYTES)
        description = read_description(system.cat_file(f"{root}/{DESCRIPTION_FILE}"))
        if not_after is not None and description.step > not_after:
            raise no_checkpoint(address, not_after)
        for name in description.files:
            check_size(system, f"{root}/{name}", MAX_CHECKPOINT_BYTES)
            system.get_file(f"{root}/{name}", str(folder / name))
    except FileNotFoundError as error:
        raise InvalidInput(
            f"{address} holds no complete checkpoint: {error} is missing",
            code="broken_checkpoint",
        ) from error
    check_content(folder, description)
    return description


def check_size(system: Any, file: str, limit: int) -> None:
    if (system.size(file) or 0) > limit:  # None: a web server does not send the size
        raise InvalidInput(f"{file} has more than {limit} bytes", code="broken_checkpoint")


def identity(description: Description) -> tuple[object, ...]:
    """What two copies of a checkpoint have in common, also if only one copy has the optimizer state."""
    return description.step, description.base_model, description.files.get(ADAPTER_FILE)


def newest_in(system: Any, root: str, address: str, not_after: int | None) -> str:
    """The folder of a checkpoint at an address: the address itself, or the newest of its folders, which are named by their
    steps. Folders of steps after `not_after` are left out.

    Raises:
        NotFound: there is no such checkpoint.
    """
    if system.exists(f"{root}/{DESCRIPTION_FILE}"):
        return root
    names: list[str] = []
    if system.exists(root):
        names = [path.rstrip("/").rpartition("/")[2] for path in system.ls(root, detail=False)]
    steps = [name for name in names if name.isdecimal() and len(name) <= MAX_STEP_DIGITS]
    for name in sorted(steps, key=int, reverse=True):
        is_early_enough = not_after is None or int(name) <= not_after
        if is_early_enough and system.exists(f"{root}/{name}/{DESCRIPTION_FILE}"):
            return f"{root}/{name}"
    raise no_checkpoint(address, not_after)


def no_checkpoint(address: str, not_after: int | None) -> NotFound:
    is_any = not_after is None
    reason = f": {DESCRIPTION_FILE} is missing" if is_any else f" up to step {not_after}"
    return NotFound(
        f"{address} holds no complete checkpoint{reason}; name an address that `art copy` has written",
        code="no_checkpoint",
    )
