"""A server without --base-model: what served last, and what gives way."""

import json
import shutil
from pathlib import Path

import pytest

from art_server.base_models import TINY_DIR
from tests.integration.live import PROJECT, Server, chat

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_a_base_model_that_merely_served_last_gives_way(tmp_path: Path) -> None:
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
            refused = client.post(
                "/api/models", json=body | {"name": "b", "base_model": "art/tiny"}
            )
            assert refused.status_code == 409
            assert refused.json()["error"]["code"] == "base_model_differs"
    finally:
        server.stop()
