"""torchvision of any build is there for transformers and vLLM, beside the torch of a CPU."""

import pytest

from art_server.shared.image_operators import is_foreign


@pytest.mark.parametrize(
    ("torch", "torchvision", "expected"),
    [
        ("2.13.0+cpu", "0.28.0", True),
        ("2.13.0+cpu", "0.28.0+cpu", False),
        ("2.13.0", "0.28.0", False),
        ("2.13.0+cu130", "0.28.0+cu130", False),
    ],
)
def test_only_another_build_beside_a_cpus_torch_is_foreign(torch: str, torchvision: str, expected: bool) -> None:
    assert is_foreign({"torch": torch, "torchvision": torchvision}) is expected


def test_no_torchvision_is_no_foreign_one() -> None:
    assert not is_foreign({"torch": "2.13.0+cpu"})


def test_a_process_of_ours_imports_classes_that_read_images() -> None:
    """This is one: conftest.py imports art_server before anything else."""
    import torchvision.transforms.v2
    from transformers import Gemma3Processor, Qwen3VLProcessor

    assert torchvision.__version__.startswith("0.") and Gemma3Processor and Qwen3VLProcessor
