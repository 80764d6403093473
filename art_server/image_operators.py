"""torchvision beside a CPU build of torch.

transformers and vLLM import torchvision for models that also read images, though only their language model is used here.
PyPI has its CUDA build only. Its compiled code does not load beside torch's CPU build; the rest does, if the two operators
exist that it describes to torch at its import.
"""

import importlib.abc
import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from typing import Any

OPERATORS = ("nms", "qnms")
"""Each chooses boxes of an image by their overlap. No language model calls them."""


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Declares the operators when a process imports torchvision, which most never do. It finds no module itself."""

    library: Any = None  # torch.library.Library; torch forgets the operators with it

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        if fullname != "torchvision" or self.library is not None:
            return
        if is_foreign(installed_versions("torch", "torchvision")):
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for name in OPERATORS:
                self.library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def declare_image_operators() -> None:
    """From here on this process can import torchvision's CUDA build beside torch's CPU build."""
    sys.meta_path.insert(0, _BeforeTorchvision())


def is_foreign(versions: Mapping[str, str]) -> bool:
    """Whether torch is a CPU build, and torchvision none."""
    torchvision = versions.get("torchvision", "+cpu")
    return versions.get("torch", "").endswith("+cpu") and not torchvision.endswith("+cpu")


def installed_versions(*names: str) -> dict[str, str]:
    """The versions of those of these packages that are installed."""
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
