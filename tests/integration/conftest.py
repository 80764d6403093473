"""One real art-server with real vLLM for all tests of this folder; chaos tests restart it in place."""

from collections.abc import Iterator

import pytest

from tests.integration.live import Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Engine and trainer in float32; a step whose log-probabilities differ by more than float32 rounds fails."""
    server = Server(tmp_path_factory.mktemp("server"))
    server.arguments = [
        "--base-model",
        "art/tiny",
        "--exact",
        "--max-seq-length",
        "1024",
    ]
    server.start()
    server.wait_ready()
    yield server
    server.stop()
