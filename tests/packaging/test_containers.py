"""The images and what starts them: linted, valid by their own schemas, and true of the server that they start.

No Docker engine is needed: the commands of the CPU's image run as a script in an empty folder.
"""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from art_server.flags import make_parser

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = ("Dockerfile", "Dockerfile.cpu")
KEY_FILE = "/run/secrets/art_api_keys"
TOOLS = Path(sys.executable).parent


def run_tool(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """One of the linters, which come with the group `dev`."""
    name, *arguments = command
    return subprocess.run(
        [TOOLS / name, *arguments], capture_output=True, text=True, check=False, cwd=ROOT
    )


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


def instructions(name: str) -> list[tuple[str, str]]:
    """A Dockerfile's instructions with their arguments, continuation lines joined."""
    lines = [line for line in (DOCKER / name).read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [(word, arguments.strip()) for word, _, arguments in found]


def argument(name: str, word: str) -> str:
    (found,) = [arguments for key, arguments in instructions(name) if key == word]
    return found


def entrypoint(name: str) -> list[str]:
    return json.loads(argument(name, "ENTRYPOINT"))


def environment(name: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in shlex.split(argument(name, "ENV")))


def compose_services() -> dict[str, Any]:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]


def deployment() -> dict[str, Any]:
    documents = yaml.safe_load_all((DOCKER / "kubernetes.yaml").read_text())
    (found,) = [document for document in documents if document["kind"] == "Deployment"]
    return found["spec"]["template"]["spec"]


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
        if variable.endswith(("_HOME", "_ROOT", "_DIR", "_BASE", "_LOCATION"))
        and variable != "CUDA_HOME"
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
    return subprocess.run(
        [sys.executable, DOCKER / "health.py", url], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("engine", ["none", "starting", "ready"])
def test_a_server_is_healthy_while_its_engine_has_not_failed(engine: str) -> None:
    with server_answering({"status": "ok", "engine": engine, "detail": None}) as url:
        assert check_health(url).returncode == 0


@pytest.mark.parametrize(
    ("detail", "told"), [("out of memory", "out of memory"), (None, "the server logs why")]
)
def test_a_failed_engine_is_unhealthy_and_the_reason_is_told(detail: str | None, told: str) -> None:
    with server_answering({"status": "ok", "engine": "failed", "detail": detail}) as url:
        result = check_health(url)
    assert (result.returncode, result.stderr) == (1, f"the engine has failed: {told}\n")


def test_a_server_that_does_not_answer_is_unhealthy() -> None:
    result = check_health(f"http://127.0.0.1:{free_port()}/health")
    assert result.returncode == 1 and result.stderr.startswith("no answer from")


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


NEEDS_ROOT = ("apt-get", "useradd")
IMAGE_FOLDER = re.compile(r"(?<![\w.])(?=/(opt/art|data|cache|run/secrets)\b)")
COMPILER = re.compile(r"(.*-)?(cc|gcc|g\+\+|c\+\+|clang|clang\+\+|nvcc)(-[\d.]+)?")
START_SECONDS = 240


@pytest.mark.long
def test_the_commands_of_the_cpu_image_end_in_a_server_that_answers(tmp_path: Path) -> None:
    python = re.match(r"python:(\d+\.\d+)-slim", argument("Dockerfile.cpu", "FROM"))
    assert python is not None
    if shutil.which(f"python{python[1]}") is None:
        pytest.skip(f"there is no Python {python[1]}, the image's, on this machine")
    image = tmp_path / "image"
    folder, variables = build("Dockerfile.cpu", image, build_arguments())

    (image / "run/secrets").mkdir(parents=True)
    (image / KEY_FILE[1:]).write_text("a-key\n")
    port = free_port()
    flags = ["--port", str(port), "--inference-port", "0", "--base-model", "art/tiny"]
    check = argument("Dockerfile.cpu", "HEALTHCHECK").partition("CMD ")[2]
    check_command = json.loads(moved(check, image).replace("7623", str(port)))
    run = {"cwd": folder, "env": {"HOME": str(image), "LANG": "C.UTF-8", **variables}}
    search = run["env"]["PATH"].split(":")[0]
    run["env"]["PATH"] = f"{search}:{programs_without_compilers(tmp_path / 'bin')}"
    with (tmp_path / "server.log").open("wb") as log:
        command = [moved(word, image) for word in entrypoint("Dockerfile.cpu")]
        command[0] = f"{search}/{command[0]}"
        check_command[0] = f"{search}/{check_command[0]}"
        server = subprocess.Popen([*command, *flags], stdout=log, stderr=log, **run)
        try:
            deadline = time.monotonic() + START_SECONDS
            health, status = "", None
            while "ready" not in health:
                assert server.poll() is None and time.monotonic() < deadline, (
                    health + (tmp_path / "server.log").read_text()
                )
                time.sleep(1)
                answer = subprocess.run(
                    check_command, check=False, capture_output=True, text=True, **run
                )
                health, status = answer.stdout + answer.stderr, answer.returncode
            assert status == 0
            with pytest.raises(urllib.error.HTTPError, match="401"):
                ask(port, key=None)
            assert ask(port, key="a-key")["choices"][0]["message"]["content"]
        finally:
            server.terminate()
            server.wait(timeout=30)  # compose's stop_grace_period


def build_arguments() -> dict[str, str | None]:
    """What the build gets on this machine: files linked from uv's cache, torch from find-links where there are any."""
    arguments: dict[str, str | None] = {"UV_LINK_MODE": "hardlink", "UV_COMPILE_BYTECODE": "0"}
    arguments["UV_CACHE_DIR"] = os.environ.get("UV_CACHE_DIR")
    find_links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS")
    if find_links:
        arguments |= {"UV_FIND_LINKS": find_links, "UV_TORCH_BACKEND": None}
    return arguments


def build(
    name: str, image: Path, arguments: Mapping[str, str | None]
) -> tuple[Path, dict[str, str]]:
    """Carry out a Dockerfile below `image`, but for what needs root. Returns the working folder and the variables."""
    build_variables: dict[str, str | None] = {}
    variables: dict[str, str] = {}
    folder = image
    for volume in json.loads(argument(name, "VOLUME")):
        (image / volume[1:]).mkdir(parents=True)
    for word, text in instructions(name):
        if word == "ARG":
            key, _, default = text.partition("=")
            build_variables[key] = default
        elif word == "ENV":
            for pair in shlex.split(moved(text, image)):
                key, _, value = pair.partition("=")
                variables[key] = value.replace("$PATH", os.environ["PATH"])
        elif word == "WORKDIR":
            folder = Path(moved(text, image))
            folder.mkdir(parents=True, exist_ok=True)
        elif word == "COPY":
            *sources, target = text.split()
            copy(sources, folder, target)
        elif word == "RUN" and not text.startswith(NEEDS_ROOT):
            values = {**os.environ, **build_variables, **arguments}
            subprocess.run(
                ["sh", "-euc", moved(re.sub(r"--mount=\S+", "", text), image)],
                cwd=folder,
                env={key: value for key, value in values.items() if value is not None},
                check=True,
            )
    return folder, variables


def moved(text: str, image: Path) -> str:
    """A text in which the image's folders lie below `image`."""
    return IMAGE_FOLDER.sub(str(image), text)


def copy(sources: Sequence[str], folder: Path, target: str) -> None:
    for source in sources:
        if (ROOT / source).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / source, folder / target, ignore=ignore)
        else:
            place = folder / target / Path(source).name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, place)


def programs_without_compilers(folder: Path) -> Path:
    """A folder of this machine's programs but for compilers, which a slim image does not have."""
    folder.mkdir()
    for program in Path("/usr/bin").iterdir():
        if not COMPILER.fullmatch(program.name):
            (folder / program.name).symlink_to(program)
    return folder


def ask(port: int, key: str | None) -> Any:
    body = {"model": "art/tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    headers = {"content-type": "application/json"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)
