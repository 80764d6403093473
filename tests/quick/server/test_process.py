"""A real art-server process, without an engine: TLS, keys that are replaced, and what it leaves readable."""

import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.quick.store.permissions import readable_by_others

SECRETS = ("first-secret", "second-secret", "third-secret", "from-flag")


@dataclass
class Running:
    process: subprocess.Popen[bytes]
    path: Path
    key_file: Path
    log: Path
    client: httpx.Client
    inference_url: str

    def status(self, key: str, path: str = "/api/models") -> int:
        headers = {"authorization": f"Bearer {key}"}
        return self.client.get(path, headers=headers).status_code

    def replace_keys(self, text: str | None) -> str:
        """Write the file of keys (None: remove it), signal, and return what the log says to it."""
        before = self.log.stat().st_size
        if text is None:
            self.key_file.unlink()
        else:
            self.key_file.write_text(text)
        self.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 30
        while "SIGHUP" not in (told := self.log.read_text()[before:]):
            assert time.monotonic() < deadline and self.process.poll() is None, told
            time.sleep(0.05)
        return told


def make_certificate(folder: Path) -> tuple[Path, Path]:
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("openssl is not installed")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-keyout", str(key), "-out", str(cert), "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("process")
    cert, key = make_certificate(folder)
    path, key_file, log = folder / "art", folder / "keys", folder / "log"
    key_file.write_text("first-secret name=alice\n")
    command = [sys.executable, "-m", "art_server.cli", "--port", "0", "--inference-port", "0"]
    command += ["--path", str(path), "--tls-cert", str(cert), "--tls-key", str(key)]
    command += ["--api-key-file", str(key_file), "--api-key", "from-flag"]
    address = path / ".server" / "address.json"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, umask=0o022)
    try:
        deadline = time.monotonic() + 120
        while not address.exists():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        urls = json.loads(address.read_text())
        trusting = ssl.create_default_context(cafile=str(cert))
        transport = httpx.HTTPTransport(verify=trusting, retries=5)
        with httpx.Client(base_url=urls["url"], transport=transport, timeout=60) as client:
            yield Running(process, path, key_file, log, client, urls["inference_url"])
    finally:
        process.terminate()
        process.wait(timeout=60)


def run_server(path: Path, *flags: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """A server that ends by itself."""
    command = [sys.executable, "-m", "art_server.cli", "--port", "0", "--inference-port", "0"]
    return subprocess.run(
        [*command, "--path", str(path), *flags],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_base_model_that_is_no_folder_ends_the_server_with_one_sentence(tmp_path: Path) -> None:
    ended = run_server(tmp_path, "--base-model", "./nothing")
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("art-server: base_model './nothing' cannot be loaded; tried: the folder")


def test_a_server_whose_program_ended_before_it_looked_ends_too(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    ended = run_server(tmp_path, "--exit-with-parent", ART_PARENT_PID=str(gone.pid))
    assert ended.returncode == 0, ended.stderr


def test_both_ports_speak_https_and_the_address_says_so(server: Running) -> None:
    assert server.client.base_url.scheme == "https"
    assert server.inference_url.startswith("https://127.0.0.1:")
    assert server.status("first-secret") == 200
    assert server.status("first-secret", f"{server.inference_url}/v1/models") == 200
    with pytest.raises(httpx.ConnectError, match=r"self.signed"):
        httpx.get(f"{server.client.base_url}/health")
    assert f"listening on {server.inference_url.rpartition(':')[0]}" in server.log.read_text()


def test_keys_are_replaced_whole_or_not_at_all(server: Running) -> None:
    assert "2 API keys are accepted" in server.replace_keys("second-secret infer name=alice\n")
    assert server.status("first-secret") == 401
    assert server.status("second-secret") == 403 and server.status("from-flag") == 200
    told = server.replace_keys("third-secret\nfirst-secret admin\n")
    assert "stay as they are" in told and "line 2" in told
    assert server.status("third-secret") == 401
    assert "cannot be read" in server.replace_keys(None)
    assert server.status("second-secret") == 403
    assert "2 API keys are accepted" in server.replace_keys("first-secret\n")
    assert server.status("second-secret") == 401 and server.status("first-secret") == 200


def test_no_key_is_in_the_log(server: Running) -> None:
    for key in (*SECRETS, "unknown-secret"):
        for path in ("/api/models", "/v1/models", "/nothing"):
            server.status(key, path)
    written = server.log.read_text()
    assert "api_keys=(ApiKey(" in written, "the settings are shown"
    assert "secret" not in written and "from-flag" not in written


def test_what_the_server_writes_is_its_user_s_only(server: Running) -> None:
    assert (server.path / ".server" / "jobs.sqlite").exists()
    assert readable_by_others(server.path) == []
