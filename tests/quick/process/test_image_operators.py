"""torchvision of any build is there for transformers and vLLM, beside the torch of a CPU."""

import subprocess
import sys

import pytest

from art_server.image_operators import is_foreign


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
    program = (
        "import art_server, torchvision.transforms.v2\n"
        "from transformers import Gemma3Processor, Qwen3VLProcessor\n"
        "import torchvision\n"
        "print(torchvision.__version__)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert done.stdout.startswith("0."), done.stderr[-2000:]


def test_our_package_alone_imports_no_torch() -> None:
    program = "import sys, art_server\nassert not {'torch', 'torchvision'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
