"""What bubblewrap can do of a Dockerfile: the workdir, variables, and files that are copied into the workdir.

The base image is not there. The host's own programs, in /usr, stand in for the image. A Dockerfile that installs something is refused.
"""

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from art.harbor.errors import TaskRefused

WITHOUT_EFFECT = {"CMD", "EXPOSE", "LABEL", "MAINTAINER"}


@dataclass
class Contents:
    """What a Dockerfile puts into the workdir."""

    workdir: PurePosixPath | None = None
    variables: dict[str, str] = field(default_factory=dict[str, str])
    copies: list[tuple[Path, PurePosixPath, bool]] = field(default_factory=list[tuple[Path, PurePosixPath, bool]])
    """Files and folders of the host, with their absolute paths in the box, and whether the path is a folder for them."""


def read_dockerfile(folder: Path) -> Contents:
    """What the Dockerfile of a task's folder `environment` puts into the workdir.

    Raises:
        TaskRefused: the Dockerfile needs an image, or names a file that does not exist.
    """
    contents, num_images = Contents(), 0
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n?", "", (folder / "Dockerfile").read_text()))
    for line in filter(None, map(str.strip, text.splitlines())):
        instruction, _, rest = line.partition(" ")
        instruction, words = instruction.upper(), shlex.split(rest)
        if instruction == "FROM":
            num_images += 1
        elif instruction == "WORKDIR" and len(words) == 1:
            contents.workdir = (contents.workdir or PurePosixPath("/")) / words[0]
        elif instruction == "ENV" and words and all("=" in word for word in words):
            contents.variables |= dict(word.split("=", 1) for word in words)
        elif instruction == "COPY" and len(words) > 1 and not any(word.startswith(("--", "[")) for word in words):
            contents.copies += _copies(folder, words, contents.workdir or PurePosixPath("/"))
        elif instruction not in WITHOUT_EFFECT:
            raise TaskRefused(
                f"{folder / 'Dockerfile'}: bubblewrap builds no image and cannot do {line[:80]!r}. It takes FROM (the host's programs are "
                f'in its place), WORKDIR, COPY into the workdir, and ENV NAME=VALUE; the sandbox "docker" or "podman" builds the image'
            )
    if num_images > 1:
        raise TaskRefused(f"{folder / 'Dockerfile'} has several FROM: bubblewrap builds no image")
    return contents


def _copies(folder: Path, words: list[str], workdir: PurePosixPath) -> list[tuple[Path, PurePosixPath, bool]]:
    *names, target = words
    sources: list[Path] = []
    for name in names:
        matches = sorted(folder.glob(name.lstrip("/"))) if name.strip("./") else [folder]
        if not matches or not all(source.resolve().is_relative_to(folder.resolve()) for source in matches):
            raise TaskRefused(f"{folder / 'Dockerfile'}: COPY {name} names no file of {folder}")
        sources += matches
    is_folder = target.endswith("/") or target in (".", "..") or len(sources) > 1
    path = workdir / target
    if ".." in path.parts:
        raise TaskRefused(f"{folder / 'Dockerfile'}: COPY to {target} is outside of the workdir")
    return [(source, path, is_folder) for source in sources]
