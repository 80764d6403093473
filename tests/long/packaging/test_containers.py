"""The images and what starts them: linted, valid by their own schemas, and true of the server that they start.

No Docker engine is needed: the commands of the CPU's image run as a script in an empty folder.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.dockerfiles import KEY_FILE, ROOT, argument, entrypoint, free_port, instructions
from tests.waiting import PATIENCE_SECONDS

NEEDS_ROOT = ("apt-get", "useradd")


IMAGE_FOLDER = re.compile(r"(?<![\w.])(?=/(opt/art|data|cache|run/secrets)\b)")


COMPILER = re.compile(r"(.*-)?(cc|gcc|g\+\+|c\+\+|clang|clang\+\+|nvcc)(-[\d.]+)?")


def test_the_commands_of_the_cpu_image_end_in_a_server_that_answers(tmp_path: Path) -> None:
    python = re.match(r"python:(\d+\.\d+)-slim", argument("Dockerfile.cpu", "FROM"))
    assert python is not None
    if shutil.which(f"python{python[1]}") is None:
        pytest.skip(f"there is no Python {python[1]}, the image's, on this machine")
    image = tmp_path / "image"
    folder, variables = build("Dockerfile.cpu", image, build_arguments())

    (image / "run/secrets").mkdir(parents=True)
    (image / KEY_FILE[1:]).write_text("a-key\n")
    port = free_port()
    flags = ["--port", str(port), "--inference-port", "0", "--base-model", "art/tiny"]
    check = argument("Dockerfile.cpu", "HEALTHCHECK").partition("CMD ")[2]
    check_command = json.loads(moved(check, image).replace("7623", str(port)))
    run = {"cwd": folder, "env": {"HOME": str(image), "LANG": "C.UTF-8", **variables}}
    search = run["env"]["PATH"].split(":")[0]
    run["env"]["PATH"] = f"{search}:{programs_without_compilers(tmp_path / 'bin')}"
    with (tmp_path / "server.log").open("wb") as log:
        command = [moved(word, image) for word in entrypoint("Dockerfile.cpu")]
        command[0] = f"{search}/{command[0]}"
        check_command[0] = f"{search}/{check_command[0]}"
        server = subprocess.Popen([*command, *flags], stdout=log, stderr=log, **run)
        try:
            deadline = time.monotonic() + PATIENCE_SECONDS
            health, status = "", None
            while "ready" not in health:
                assert server.poll() is None and time.monotonic() < deadline, (
                    health + (tmp_path / "server.log").read_text()
                )
                time.sleep(1)
                answer = subprocess.run(check_command, check=False, capture_output=True, text=True, **run)
                health, status = answer.stdout + answer.stderr, answer.returncode
            assert status == 0
            with pytest.raises(urllib.error.HTTPError, match="401"):
                ask(port, key=None)
            assert ask(port, key="a-key")["choices"][0]["message"]["content"]
        finally:
            server.terminate()
            server.wait(timeout=PATIENCE_SECONDS)


def build_arguments() -> dict[str, str | None]:
    """What the build gets on this machine: files linked from uv's cache, torch from find-links where there are any."""
    arguments: dict[str, str | None] = {"UV_LINK_MODE": "hardlink"}
    arguments["UV_CACHE_DIR"] = os.environ.get("UV_CACHE_DIR")
    find_links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS")
    if find_links:
        arguments |= {"UV_FIND_LINKS": find_links, "UV_TORCH_BACKEND": None}
    return arguments


def build(name: str, image: Path, arguments: Mapping[str, str | None]) -> tuple[Path, dict[str, str]]:
    """Carry out a Dockerfile below `image`, but for what needs root. Returns the working folder and the variables."""
    build_variables: dict[str, str | None] = {}
    variables: dict[str, str] = {}
    folder = image
    for volume in json.loads(argument(name, "VOLUME")):
        (image / volume[1:]).mkdir(parents=True)
    for word, text in instructions(name):
        if word == "ARG":
            key, _, default = text.partition("=")
            build_variables[key] = default
        elif word == "ENV":
            for pair in shlex.split(moved(text, image)):
                key, _, value = pair.partition("=")
                variables[key] = value.replace("$PATH", os.environ["PATH"])
        elif word == "WORKDIR":
            folder = Path(moved(text, image))
            folder.mkdir(parents=True, exist_ok=True)
        elif word == "COPY":
            *sources, target = text.split()
            copy(sources, folder, target)
        elif word == "RUN" and not text.startswith(NEEDS_ROOT):
            values = {**os.environ, **build_variables, **arguments}
            subprocess.run(
                ["sh", "-euc", moved(re.sub(r"--mount=\S+", "", text), image)],
                cwd=folder,
                env={key: value for key, value in values.items() if value is not None},
                check=True,
            )
    return folder, variables


def moved(text: str, image: Path) -> str:
    """A text in which the image's folders lie below `image`."""
    return IMAGE_FOLDER.sub(str(image), text)


def copy(sources: Sequence[str], folder: Path, target: str) -> None:
    for source in sources:
        if (ROOT / source).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / source, folder / target, ignore=ignore)
        else:
            destination = folder / target / Path(source).name
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, destination)


def programs_without_compilers(folder: Path) -> Path:
    """A folder of this machine's programs but for compilers, which a slim image does not have."""
    folder.mkdir()
    for program in Path("/usr/bin").iterdir():
        if not COMPILER.fullmatch(program.name):
            (folder / program.name).symlink_to(program)
    return folder


def ask(port: int, key: str | None) -> Any:
    body = {"model": "art/tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    headers = {"content-type": "application/json"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
        return json.load(answer)
