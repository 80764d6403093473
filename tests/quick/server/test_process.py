"""A real art-server process, without an engine: its keys on both ports, and what it leaves readable."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from art_server.cli import farewell
from tests.quick.store.permissions import readable_by_others
from tests.waiting import PATIENCE_SECONDS, wait_until

SECRETS = ("first-secret", "second-secret", "from-flag")


@dataclass
class Running:
    path: Path
    log: Path
    client: httpx.Client
    inference_url: str

    def status(self, key: str, path: str = "/api/models") -> int:
        headers = {"authorization": f"Bearer {key}"}
        return self.client.get(path, headers=headers).status_code


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("process")
    path, key_file, log = folder / "art", folder / "keys", folder / "log"
    key_file.write_text("first-secret name=alice\nsecond-secret infer\n")
    command = [sys.executable, "-m", "art_server", "--port", "0", "--inference-port", "0"]
    command += ["--path", str(path), "--api-key-file", str(key_file), "--api-key", "from-flag"]
    address = path / ".server" / "address.json"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, umask=0o022)
    try:
        wait_until(lambda: address.exists() or process.poll() is not None, log.read_text)
        assert process.poll() is None, log.read_text()
        urls = json.loads(address.read_text())
        transport = httpx.HTTPTransport(retries=5)
        with httpx.Client(base_url=urls["url"], transport=transport, timeout=PATIENCE_SECONDS) as client:
            yield Running(path, log, client, urls["inference_url"])
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_SECONDS)


def run_server(path: Path, *flags: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """A server that ends by itself."""
    command = [sys.executable, "-m", "art_server", "--port", "0", "--inference-port", "0"]
    return subprocess.run(
        [*command, "--path", str(path), *flags],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


def test_a_base_model_that_is_no_folder_ends_the_server_with_one_sentence(tmp_path: Path) -> None:
    ended = run_server(tmp_path, "--base-model", "./nothing")
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("art-server: base_model './nothing' cannot be loaded; tried: the folder")


def test_a_signal_that_ends_the_server_is_logged(tmp_path: Path) -> None:
    address, log = tmp_path / "art" / ".server" / "address.json", tmp_path / "log"
    command = [sys.executable, "-m", "art_server", "--port", "0", "--inference-port", "0"]
    with (
        log.open("wb") as output,
        subprocess.Popen([*command, "--path", str(tmp_path / "art")], stdout=output, stderr=output) as process,
    ):
        wait_until(lambda: address.exists() or process.poll() is not None, log.read_text)
        url = json.loads(address.read_text())["url"]
        with httpx.Client(transport=httpx.HTTPTransport(retries=5), timeout=PATIENCE_SECONDS) as client:
            assert client.get(f"{url}/health").status_code == 200
        process.terminate()
    assert "SIGTERM: the server ends\n" in log.read_text()


@pytest.mark.parametrize(
    ("pending", "line"),
    [
        ({}, "SIGTERM: the server ends"),
        ({"running": (1, 0.0)}, "SIGTERM: the server ends; 1 running job continues at the next start"),
        (
            {"queued": (2, 0.0), "running": (1, 0.0)},
            "SIGTERM: the server ends; 1 running and 2 queued jobs continue at the next start",
        ),
    ],
)
def test_the_line_of_a_signal_counts_the_jobs(pending: dict[str, tuple[int, float]], line: str) -> None:
    assert farewell(signal.SIGTERM, pending) == line


def test_a_server_whose_program_ended_before_it_looked_ends_too(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    ended = run_server(tmp_path, "--exit-with-parent", ART_PARENT_PID=str(gone.pid))
    assert ended.returncode == 0, ended.stderr


def test_the_keys_of_flag_and_file_are_accepted_on_both_ports(server: Running) -> None:
    assert server.status("first-secret") == 200 and server.status("from-flag") == 200
    assert server.status("second-secret") == 403 and server.status("unknown-secret") == 401
    for key, status in (("second-secret", 200), ("unknown-secret", 401)):
        assert server.status(key, f"{server.inference_url}/v1/models") == status
    assert f"listening on {server.client.base_url}".rstrip("/") in server.log.read_text()


def test_no_key_is_in_the_log(server: Running) -> None:
    for key in (*SECRETS, "unknown-secret"):
        for path in ("/api/models", "/v1/models", "/nothing"):
            server.status(key, path)
    written = server.log.read_text()
    assert "api_keys=(ApiKey(" in written, "the settings are shown"
    assert "secret" not in written and "from-flag" not in written


def test_what_the_server_writes_is_its_user_s_only(server: Running) -> None:
    assert (server.path / ".server" / "server.sqlite").exists()
    assert readable_by_others(server.path) == []
