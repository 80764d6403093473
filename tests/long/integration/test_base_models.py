"""Which base model a server loads: downloads from a hub, the model of the last run, and models that are replaced."""

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from art_server.store.base_models import TINY_DIR
from tests.live import PROJECT, Server, chat
from tests.waiting import PATIENCE_SECONDS


def test_a_base_model_that_merely_served_last_is_replaced(tmp_path: Path) -> None:
    other = tmp_path / "other-model"
    shutil.copytree(TINY_DIR, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    server = Server(tmp_path)
    (tmp_path / "art" / ".server").mkdir(parents=True)
    (tmp_path / "art" / ".server" / "base.json").write_text('{"base_model": "art/tiny"}')
    server.start()
    try:
        with server.client() as client:
            assert client.get("/health").json()["base_model"] == "art/tiny"
            body = {"name": "a", "project": PROJECT, "base_model": str(other)}
            info = client.post("/api/models", json=body).json()
            assert info["base_model"] == str(other) and info["max_seq_length"] == 2048
            assert chat(client, f"{PROJECT}/a")["choices"][0]["art"]["step"] == 0
            refused = client.post("/api/models", json=body | {"name": "b", "base_model": "art/tiny"})
            assert refused.status_code == 409
            assert refused.json()["error"]["code"] == "base_model_differs"
    finally:
        server.stop()


class SlowHub(BaseHTTPRequestHandler):
    """A hub that waits for `go_on` before it answers, and then has no models."""

    go_on = threading.Event()

    def do_GET(self) -> None:
        self.go_on.wait(PATIENCE_SECONDS)
        self.send_response(404)
        self.send_header("x-error-code", "RepoNotFound")
        self.send_header("content-length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None: ...


def test_the_port_is_open_while_a_base_model_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = ThreadingHTTPServer(("127.0.0.1", 0), SlowHub)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    blobs = tmp_path / "hub" / "hub" / "models--org--large" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc.incomplete").write_bytes(b"x" * 250_000_000)
    server = Server(tmp_path)
    server.arguments = ["--base-model", "org/large"]
    try:
        server.start()
        with server.client() as client:
            health = client.get("/health").json()
            assert (health["status"], health["engine"]) == ("ok", "starting")
            assert health["detail"] == "downloading org/large: 0.2 GB so far"
            assert client.get("/ready").status_code == 503
        SlowHub.go_on.set()
        assert server.process is not None and server.process.wait(timeout=PATIENCE_SECONDS) == 2
        assert "base_model 'org/large' cannot be loaded" in server.log_tail()
    finally:
        SlowHub.go_on.set()
        hub.shutdown()
        hub.server_close()
        server.stop()
