"""Who else could read a folder's files."""

from pathlib import Path


def readable_by_others(root: Path) -> list[Path]:
    return [path for path in [root, *root.rglob("*")] if path.lstat().st_mode & 0o077]
