"""Clients that break off, read slowly, or never speak: a real art-server, without an engine, stays as it was."""

import socket
import struct
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.live import Server
from tests.waiting import PATIENCE_SECONDS, wait_until

NUM_CLIENTS = 200


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(tmp_path_factory.mktemp("sockets"))
    started.start()
    yield started
    started.stop()


def connect(server: Server) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=PATIENCE_SECONDS)


def reset(client: socket.socket) -> None:
    """Hang up without a goodbye: RST in place of FIN."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def settled(server: Server, num_handles: int) -> None:
    """The server answers, and holds no more than before."""
    assert server.process is not None
    process = psutil.Process(server.process.pid)
    wait_until(
        lambda: process.num_fds() <= num_handles + 4, lambda: f"{process.num_fds()} handles, {num_handles} before"
    )
    health = httpx.get(f"{server.url}/health", timeout=PATIENCE_SECONDS).json()
    assert health["faults"] == {}
    assert "Traceback" not in server.log_tail()


def num_handles(server: Server) -> int:
    assert server.process is not None
    httpx.get(f"{server.url}/health")
    return psutil.Process(server.process.pid).num_fds()


HEAD = b"POST /api/models/p/a/log HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100000\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat", HEAD, HEAD + b'{"groups": [' * 1000], ids=len)
def test_clients_that_are_reset_in_the_middle(server: Server, sent: bytes) -> None:
    before = num_handles(server)
    for _ in range(NUM_CLIENTS):
        client = connect(server)
        client.sendall(sent)
        reset(client)
    settled(server, before)


def test_clients_that_never_go_on_hold_up_nobody(server: Server) -> None:
    before = num_handles(server)
    silent = [connect(server) for _ in range(NUM_CLIENTS)]
    for index, client in enumerate(silent):
        client.sendall(HEAD[: index % len(HEAD)])
    with httpx.Client(timeout=PATIENCE_SECONDS) as http:
        for _ in range(20):
            assert http.get(f"{server.url}/health").status_code == 200
    for client in silent:
        reset(client)
    settled(server, before)


def test_readers_that_do_not_read_cost_little_memory(server: Server) -> None:
    """Each asks for the same page again and again, and takes none of the answers."""
    assert server.process is not None
    process = psutil.Process(server.process.pid)
    before, memory = num_handles(server), process.memory_info().rss
    request = b"GET /openapi.json HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    slow = [connect(server) for _ in range(20)]
    for client in slow:
        client.setblocking(False)
        for _ in range(500):
            try:
                client.send(request)
            except BlockingIOError:
                break
    time.sleep(1.0)
    assert httpx.get(f"{server.url}/health", timeout=PATIENCE_SECONDS).status_code == 200
    assert process.memory_info().rss - memory < 100 * 2**20
    for client in slow:
        reset(client)
    settled(server, before)
