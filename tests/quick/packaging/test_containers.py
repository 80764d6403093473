"""The images and what starts them: linted, valid by their own schemas, and true of the server that they start.

No Docker engine is needed: the commands of the CPU's image run as a script in an empty folder.
"""

import json
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from art_server.flags import make_parser
from art_server.machines.host import parse as parse_host
from tests.dockerfiles import DOCKER, KEY_FILE, ROOT, argument, entrypoint, free_port, instructions

DOCKERFILES = ("Dockerfile", "Dockerfile.cpu")


TOOLS = Path(sys.executable).parent


def run_tool(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """One of the linters, which come with the group `dev`."""
    name, *arguments = command
    return subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=False, cwd=ROOT)


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    return run_tool("hadolint", "--no-color", "--failure-threshold", "error", path)


def check_compose(path: Path) -> subprocess.CompletedProcess[str]:
    """By the JSON schema of the compose specification, which check-jsonschema carries."""
    return run_tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", path)


def check_kubernetes(path: Path) -> subprocess.CompletedProcess[str]:
    return run_tool("kubernetes-validate", "--strict", path)


CHECKS = {
    "Dockerfile": (hadolint, "\nUSER ", "\nSERVANT ", "unexpected 'S'"),
    "Dockerfile.cpu": (hadolint, "\nUSER ", "\nSERVANT ", "unexpected 'S'"),
    "compose.yaml": (check_compose, "\n  init: ", "\n  initial: ", "'initial'"),
    "kubernetes.yaml": (check_kubernetes, "terminationGracePeriod", "grace", "'graceSeconds'"),
    "kubernetes-hosts.yaml": (check_kubernetes, "automountServiceAccountToken", "automount", "'automount'"),
}
"""For each file its check, a key of it, one that does not exist, and what the check says of it."""


@pytest.mark.parametrize("name", CHECKS)
def test_a_file_passes_its_own_check(name: str) -> None:
    check = CHECKS[name][0]
    result = check(DOCKER / name)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", CHECKS)
def test_a_key_that_does_not_exist_fails_the_check(name: str, tmp_path: Path) -> None:
    check, key, bogus, told = CHECKS[name]
    text = (DOCKER / name).read_text()
    assert key in text
    changed = tmp_path / name
    changed.write_text(text.replace(key, bogus))
    result = check(changed)
    assert result.returncode != 0
    assert told in result.stdout + result.stderr


def environment(name: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in shlex.split(argument(name, "ENV")))


def compose_services() -> dict[str, Any]:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]


def deployment() -> dict[str, Any]:
    documents = yaml.safe_load_all((DOCKER / "kubernetes.yaml").read_text())
    (manifest,) = [document for document in documents if document["kind"] == "Deployment"]
    return manifest["spec"]["template"]["spec"]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_starts_the_server_with_flags_that_it_has(name: str) -> None:
    program, *flags = entrypoint(name)
    assert program == "art-server"
    parsed = make_parser().parse_args([*flags, "--base-model", "art/tiny"])
    assert (parsed.host, str(parsed.path), str(parsed.api_key_file)) == (
        "0.0.0.0",
        "/data",
        KEY_FILE,
    )


def test_compose_and_kubernetes_bring_the_keys_where_the_images_read_them() -> None:
    for service in compose_services().values():
        assert [f"/run/secrets/{name}" for name in service["secrets"]] == [KEY_FILE]
    (container,) = deployment()["containers"]
    assert KEY_FILE in [mount["mountPath"] for mount in container["volumeMounts"]]
    assert make_parser().parse_args(container["args"]).base_model


def test_the_manifests_of_hosts_start_a_command_that_there_is() -> None:
    (container,) = yaml.safe_load((DOCKER / "kubernetes-hosts.yaml").read_text())["spec"]["template"]["spec"][
        "containers"
    ]
    program, host, *flags = [*container["command"], *container["args"]]
    assert (program, host) == ("art-server", "host") and parse_host(flags).engines == 1
    task = yaml.safe_load((DOCKER.parent / "scripts" / "sky-hosts.yaml").read_text())
    (line,) = [line for line in task["run"].splitlines() if "art-server host" in line]
    assert parse_host(shlex.split(line)[3:-1]).join == "$ART_URL"


def test_a_reservation_and_a_limit_ask_for_a_gpu_and_the_cpu_profile_for_none() -> None:
    services = compose_services()
    (device,) = services["gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert "deploy" not in services["cpu"]
    assert deployment()["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"


@pytest.mark.parametrize("name", DOCKERFILES)
def test_whatever_a_start_writes_lies_on_a_volume(name: str) -> None:
    volumes = json.loads(argument(name, "VOLUME"))
    caches = {
        variable: value
        for variable, value in environment(name).items()
        if variable.endswith(("_HOME", "_ROOT", "_DIR", "_BASE", "_LOCATION")) and variable != "CUDA_HOME"
    }
    assert {"HF_HOME", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR"} <= set(caches)
    assert all(value.startswith("/cache/") for value in caches.values())
    mounted = [
        *(volume.split(":")[1] for volume in compose_services()["gpu"]["volumes"]),
        *(mount["mountPath"] for mount in deployment()["containers"][0]["volumeMounts"]),
    ]
    assert all(mounted.count(volume) == 2 for volume in volumes)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_copies_what_is_there_and_not_ignored(name: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for word, arguments in instructions(name):
        if word != "COPY":
            continue
        for source in arguments.split()[:-1]:
            assert (ROOT / source).exists(), source
            kept = {source, *map(str, Path(source).parents)}
            assert kept & {line[1:] for line in ignored if line.startswith("!")}, source


def test_the_images_cuda_is_that_of_the_constraints() -> None:
    (toolkit,) = re.findall(
        r"^cuda-toolkit==(\d+\.\d+)\.",
        (ROOT / "constraints" / "gpu.txt").read_text(),
        re.MULTILINE,
    )
    assert argument("Dockerfile", "FROM").startswith(f"nvidia/cuda:{toolkit}.")
    assert "ubuntu24.04" in argument("Dockerfile", "FROM")


@contextmanager
def server_answering(body: Mapping[str, Any]) -> Iterator[str]:
    """The address of a server whose every answer is `body`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/health"
        server.shutdown()
        thread.join()


def check_health(url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, DOCKER / "health.py", url], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("engine", ["none", "starting", "ready"])
def test_a_server_is_healthy_while_its_engine_has_not_failed(engine: str) -> None:
    with server_answering({"status": "ok", "engine": engine, "detail": None}) as url:
        assert check_health(url).returncode == 0


@pytest.mark.parametrize(("detail", "told"), [("out of memory", "out of memory"), (None, "the server logs why")])
def test_a_failed_engine_is_unhealthy_and_the_reason_is_reported(detail: str | None, told: str) -> None:
    with server_answering({"status": "ok", "engine": "failed", "detail": detail}) as url:
        result = check_health(url)
    assert (result.returncode, result.stderr) == (1, f"the engine has failed: {told}\n")


def test_a_server_that_does_not_answer_is_unhealthy() -> None:
    result = check_health(f"http://127.0.0.1:{free_port()}/health")
    assert result.returncode == 1 and result.stderr.startswith("no answer from")
