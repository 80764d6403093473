"""Dockerfiles taken apart."""

import json
import socket
from pathlib import Path

ROOT = Path(__file__).parents[1]


DOCKER = ROOT / "docker"


KEY_FILE = "/run/secrets/art_api_keys"


def instructions(name: str) -> list[tuple[str, str]]:
    """A Dockerfile's instructions with their arguments, continuation lines joined."""
    lines = [line for line in (DOCKER / name).read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    parts = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [(word, arguments.strip()) for word, _, arguments in parts]


def argument(name: str, word: str) -> str:
    (text,) = [arguments for key, arguments in instructions(name) if key == word]
    return text


def entrypoint(name: str) -> list[str]:
    return json.loads(argument(name, "ENTRYPOINT"))


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]
