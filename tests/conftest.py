"""What all tests share: one real art-server with real vLLM, which starts when the first test asks for it."""

import os

import art_server  # noqa: F401  # isort: skip - first, for torchvision
import gc
import signal
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.fakes.collector import Collector
from tests.live import Server

# Machines that are busy with other tests are slow now and then; examples are the same in each run.
settings.register_profile("busy", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# A script that starts the tests in the background, or with nohup, has them ignore Ctrl-C or SIGHUP, and so the programs to which
# they send these signals.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What tests import lives until the end. Each collection of garbage would look at all of it, half a second long."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """What the server reports of its requests and jobs."""
    endpoint = Collector()
    yield endpoint
    endpoint.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Server]:
    """Engine and trainer in float32; a step whose log-probabilities differ by more than float32 rounds fails.
    `ART_TEST_SERVER_FLAGS="--engines 2 --ranks 2"` has the tests use such a server."""
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
        *os.environ.get("ART_TEST_SERVER_FLAGS", "").split(),
    ]
    with server.running():
        yield server
