"""Writes files so that a crash at any point leaves the old state or the new one, never a mixture."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from art_server.errors import Conflict, StorageFull, UsageError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""Errors of a disk that cannot be written: full, over quota, file too large, read-only, broken."""
LOCK_ATTEMPTS, LOCK_SECONDS = 20, 0.05
"""A command such as `art status` holds the lock of a folder for a moment, to see whether a server works there."""

SECRET_BYTES = 32


def keep_private(root: Path) -> None:
    """Makes new files of this process and its children readable by their user only. Makes the folder `root`, and restricts the
    folders that an earlier server created there.

    Raises:
        UsageError: the folder cannot be made.
        OSError: the rights of a folder cannot be changed.
    """
    os.umask(0o077)
    make_folder(root)
    for folder in (root / ".server", root / "logs", *root.glob("*/models")):
        if folder.is_dir():
            folder.chmod(0o700)


def make_folder(folder: Path) -> None:
    """Makes a folder of `--path`, with its parents.

    Raises:
        UsageError: the folder cannot be made.
    """
    with path_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def path_errors(path: Path) -> Iterator[None]:
    """Translates an error of the block about a folder or file of `--path`.

    Raises:
        UsageError: the folder or file cannot be made or used.
    """
    try:
        yield
    except OSError as error:
        reason = "it is no folder" if isinstance(error, FileExistsError) else error.strerror
        raise UsageError(
            f"--path: {path} cannot be made or used ({reason}): name a folder in which this user may write"
        ) from error


def lock_folder(folder: Path, path: Path) -> int:
    """Locks the folder of a server or host, which is made if necessary: two servers in one folder would break each other's jobs.
    `path` is the value of `--path`. Returns the lock's descriptor.

    Raises:
        Conflict: another server or host holds the lock.
        UsageError: the folder cannot be made.
    """
    import fcntl  # imported here: Windows lacks it, and commands that only read run there too

    make_folder(folder)
    with path_errors(folder / "lock"):
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for _ in range(LOCK_ATTEMPTS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            time.sleep(LOCK_SECONDS)
    os.close(descriptor)
    raise Conflict(
        f"another art-server works in {path.resolve()}: stop it, or give this one another --path",
        code="path_in_use",
        param="path",
    )


@contextlib.contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Translates errors of a full or unwritable disk inside the block.

    Raises:
        StorageFull: the disk has no room for `what`, or cannot be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise StorageFull(
                f"cannot write {what} to the disk ({error.strerror}): free some space under the server's --path, check "
                "that it is writable, and repeat the request",
                code="no_disk_space",
            ) from error
        raise


def sync(path: Path) -> None:
    """Makes a file's content, or a folder's renames and new entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def finish(file: IO[bytes]) -> None:
    """Makes what was written to an open file durable."""
    file.flush()
    os.fsync(file.fileno())


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def write_file(path: Path, data: bytes) -> None:
    """Replaces `path` by `data`: writes a temporary file beside it, fsyncs, renames."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Of the names that `clear_temporary` deletes after a crash.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    with disk_errors(str(path.name)):
        try:
            with open(temporary, "wb", opener=_open_private) as file:
                file.write(data)
                finish(file)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)  # exists only after an error
    sync(path.parent)


def read_secret(file: Path) -> bytes:
    """A secret of the server's own, readable by the server's user only. The first call makes the secret."""
    if not file.exists():
        write_file(file, os.urandom(SECRET_BYTES))
    return file.read_bytes()


def write_json(path: Path, value: Any) -> None:
    write_file(path, json.dumps(value, indent=2).encode())


def append_line(path: Path, value: Any) -> None:
    """Appends one JSON line. If a crash cut the last line short, that line is ended first, so that no other line is lost."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk_errors(path.name), open(path, "ab+") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(value).encode() + b"\n")
        finish(file)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the JSON lines of a file that may not exist. Skips lines that a crash cut short."""
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    for line in path.read_bytes().split(b"\n"):  # Python's splitlines also splits at U+2028, which JSON need not escape
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def file_mark(file: Path) -> tuple[int, int]:
    """Size and time of the last change; zeros without the file."""
    try:
        stat = os.stat(file)
    except OSError:
        return 0, 0
    return stat.st_size, stat.st_mtime_ns


def publish_folder(temporary: Path, final: Path) -> None:
    """Renames a finished folder to its final name, durably. Its files must be fsynced already."""
    with disk_errors(final.name):
        sync(temporary)
        os.rename(temporary, final)
        sync(final.parent)


def remove_folder(folder: Path) -> None:
    """Deletes a folder. Renames it first, so that no reader sees half of it."""
    shutil.rmtree(bury_folder(folder))


def bury_folder(folder: Path) -> Path:
    """Renames a folder that is to be deleted, so that no reader finds it. Returns the new path."""
    trash = folder.with_name(f".removed-{uuid.uuid4().hex}")
    os.rename(folder, trash)
    sync(folder.parent)
    return trash


def copy_file(source: Path, target: Path) -> None:
    """Copies a file's content to a new file and fsyncs it."""
    with disk_errors(target.name), open(source, "rb") as reader, open(target, "xb") as writer:
        shutil.copyfileobj(reader, writer, 2**20)
        finish(writer)


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_size(folder: Path) -> int:
    """Bytes of all files in a folder and below.

    Raises:
        FileNotFoundError: a file was deleted meanwhile.
    """
    return sum(entry.stat().st_size for entry in folder.rglob("*") if not entry.is_dir())


def clear_temporary(folder: Path) -> None:
    """Deletes unfinished files and folders in `folder`."""
    _remove_all(folder.glob(".*.tmp"))


def clear_graves(folder: Path) -> None:
    """Deletes the folders that an earlier process renamed for deletion (`bury_folder`)."""
    _remove_all(folder.glob(".removed-*"))


def _remove_all(entries: Iterable[Path]) -> None:
    for entry in entries:
        # Another thread may be deleting the same.
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
