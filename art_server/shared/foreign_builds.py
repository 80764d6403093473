"""Packages beside torch's CPU build that were built for CUDA.

vLLM's build for CPUs requires torchvision, torchaudio and torchcodec, and PyPI has only their CUDA builds. Beside torch's CPU build
their compiled code does not load, and importing them fails in ways that vLLM and transformers do not expect. No language model
needs them, but vLLM and transformers import torchvision for models that also read images.

So in a process that imports this package, torchaudio and torchcodec are as if they were not installed. torchvision's Python code
loads if two operators exist: torchvision describes them to torch while torchvision is imported.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

FOR_SOUND = ("torchaudio", "torchcodec")

OPERATORS = ("nms", "qnms")
"""Both choose boxes of an image by overlap. No language model calls them."""


class _BeforeTorch:
    """Acts when a process imports torch or torchvision, or asks whether they are there. Finds no module itself."""

    has_seen_torch = False
    mends_torchvision = False
    library: Any = None  # torch.library.Library; torch forgets the operators with this object

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        if fullname in ("torch", "torchvision") and not self.has_seen_torch:
            self.has_seen_torch = True
            foreign = foreign_builds(installed_versions("torch", "torchvision", *FOR_SOUND))
            self.mends_torchvision = "torchvision" in foreign
            for name in foreign & {*FOR_SOUND}:
                # How Python marks a module that cannot be imported. importlib.util.find_spec does not find it either.
                sys.modules.setdefault(name, None)  # pyright: ignore[reportArgumentType]
        if fullname == "torchvision" and self.mends_torchvision and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for name in OPERATORS:
                self.library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def tolerate_foreign_builds() -> None:
    """Has this process import torch's CPU build, vLLM and transformers beside packages that were built for CUDA."""
    sys.meta_path.insert(0, _BeforeTorch())


def foreign_builds(versions: Mapping[str, str]) -> set[str]:
    """The packages of other builds than torch's, if torch is a CPU build."""
    if not versions.get("torch", "").endswith("+cpu"):
        return set()
    return {name for name, version in versions.items() if not version.endswith("+cpu")}


def installed_versions(*names: str) -> dict[str, str]:
    """The version of each of these packages that is installed, by name."""
    import importlib.metadata  # here: `import art_server` does not need it, and is fast without it

    versions: dict[str, str] = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
