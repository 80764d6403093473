"""torchvision beside a CPU build of torch.

transformers and vLLM import torchvision for models that also read images, though only their language model is used here.
PyPI has only torchvision's CUDA build, whose compiled code does not load beside torch's CPU build. torchvision's Python code
does load, if two operators exist: torchvision describes them to torch while torchvision is imported.
"""

import importlib.abc
import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from typing import Any

OPERATORS = ("nms", "qnms")
"""Both choose boxes of an image by overlap. No language model calls them."""


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Declares the operators when a process imports torchvision; most processes never do. Finds no module itself."""

    library: Any = None  # torch.library.Library; torch forgets the operators with this object

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        if fullname != "torchvision" or self.library is not None:
            return
        if is_foreign(installed_versions("torch", "torchvision")):
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for name in OPERATORS:
                self.library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def declare_image_operators() -> None:
    """Lets this process import torchvision's CUDA build beside torch's CPU build."""
    sys.meta_path.insert(0, _BeforeTorchvision())


def is_foreign(versions: Mapping[str, str]) -> bool:
    """Whether torch is a CPU build and torchvision is not."""
    torchvision = versions.get("torchvision", "+cpu")
    return versions.get("torch", "").endswith("+cpu") and not torchvision.endswith("+cpu")


def installed_versions(*names: str) -> dict[str, str]:
    """The version of each of these packages that is installed, by name."""
    versions: dict[str, str] = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
