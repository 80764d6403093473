"""One real art-server with real vLLM for all tests of this folder; chaos tests restart it in place."""

import gc
from collections.abc import Iterator

import pytest

from tests.collector import Collector
from tests.integration.live import Server


@pytest.fixture(scope="module", autouse=True)
def garbage() -> Iterator[None]:
    """Collected at the end of each file, so that a connection which nobody closed fails a test of this file."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """What the server reports of its requests and jobs."""
    made = Collector()
    yield made
    made.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Server]:
    """Engine and trainer in float32; a step whose log-probabilities differ by more than float32 rounds fails."""
    server = Server(tmp_path_factory.mktemp("server"))
    server.environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    server.arguments = [
        "--base-model",
        "art/tiny",
        "--exact",
        "--max-seq-length",
        "1024",
        "--tracker",
        "otlp",
    ]
    server.start()
    server.wait_ready()
    yield server
    server.stop()
