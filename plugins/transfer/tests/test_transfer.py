"""`art export`, `art import`, `art copy`: from a server's folder, and from one that runs and breaks its connections."""

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import fsspec
import httpx
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from art_server.errors import Unavailable
from art_server.settings import ApiKey, ServerConfig
from art_server.store.base_models import SMOLLM2_ID, TINY_DIR
from art_server.store.files import lock_folder
from art_server.store.model_folder import (
    ADAPTER_FILE,
    CONFIG_FILE,
    DESCRIPTION_FILE,
    OPTIMIZER_FILE,
)
from art_transfer import http_transfer, transfer
from art_transfer.export import public_name
from tests.makers.first_steps import write_first_checkpoint
from tests.makers.toy_models import make_model
from tests.quick.models.house import TINY_LORA, add_model
from tests.quick.models.transfers import model, run, same_weights, serving

IDS = torch.tensor([[5, 17, 300, 42]])


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("ART_API_KEY", raising=False)
    monkeypatch.setattr(http_transfer, "WAIT_SECONDS", 0.01)
    torch.set_num_threads(1)
    os.umask(mask := os.umask(0))
    yield
    os.umask(mask)


OF_SERVERS = {
    *(
        "fastapi",
        "starlette",
        "uvicorn",
        "uvloop",
        "aiohttp",
        "msgspec",
        "websockets",
        "fsspec",
        "jinja2",
        "vllm",
        "torch",
    ),
    *("transformers", "huggingface_hub", "tokenizers", "peft", "matplotlib", "plotly", "prometheus_client"),
}
"""The modules of the extra `server` that the extra `terminal` lacks."""
WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in {missing}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
{before}
from art_watch.terminal.cli import main
main({words})
"""


def ran_without(missing: set[str], *words: str, before: str = "") -> str:
    """What a command that fails prints in an environment without these packages."""
    code = WITHOUT.format(missing=missing, words=list(words), before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    return done.stderr


def test_a_missing_package_is_named_with_the_extra_of_the_command(tmp_path: Path) -> None:
    folder, url = tmp_path / "lora", "http://127.0.0.1:9"
    write_first_checkpoint(str(TINY_DIR), TINY_LORA, 0, folder)
    to_server = ["import", str(folder), "--model", "p/a", "--url", url]
    for words in (["export", "p/a", str(tmp_path / "out"), "--url", url], to_server):
        assert "'.[terminal]'" in ran_without({"safetensors"}, *words)
    here = ["export", "p/a", str(tmp_path / "out"), "--path", str(tmp_path)]
    assert "'.[server]'" in ran_without({"safetensors"}, *here)
    at_once = "from art_transfer import http_transfer; http_transfer.WAIT_SECONDS = 0.0"
    assert "no answer from the server" in ran_without(OF_SERVERS, *to_server, before=at_once)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 2) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        run(*arguments)
    assert end.value.code == code
    said = capsys.readouterr().err
    assert said.startswith("art: ") and said.count("\n") == 1, said
    return said


# --- export -------------------------------------------------------------------------------------------------------


def test_an_exported_adapter_loads_with_peft_and_names_its_base(path: Path, tmp_path: Path) -> None:
    run("export", "p/a@1", tmp_path / "out", "--path", path)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {ADAPTER_FILE, CONFIG_FILE}
    config = json.loads((tmp_path / "out" / CONFIG_FILE).read_text())
    assert config["base_model_name_or_path"] == "art/tiny"
    base = AutoModelForCausalLM.from_pretrained(TINY_DIR)
    before = base(IDS).logits
    adapted = PeftModel.from_pretrained(base, tmp_path / "out")
    assert not torch.allclose(adapted(IDS).logits, before, atol=1e-2)


def test_a_base_has_the_name_by_which_others_find_it(tmp_path: Path) -> None:
    assert public_name("smollm2") == SMOLLM2_ID
    assert public_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert public_name(str(tmp_path)) == str(tmp_path)
    assert public_name(name := "x" * 1024) == name  # longer than a folder can be called


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_model_says_what_the_adapter_says(dtype: torch.dtype, path: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(TINY_DIR, dtype=dtype)
    base.save_pretrained(tmp_path / "base")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "base" / name).write_bytes((TINY_DIR / name).read_bytes())
    content = model(path, "a", "p").checkpoint_dir(2)
    run("import", content, "--model", "q/b", "--base-model", tmp_path / "base", "--path", path)
    run("export", "b", tmp_path / "out", "--merge", "--path", path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    assert merged.dtype == dtype and list((tmp_path / "out").glob("*.safetensors"))
    adapted = PeftModel.from_pretrained(base, content)
    gap = (merged(IDS).logits - adapted(IDS).logits).abs().max().item()
    assert gap < (1e-4 if dtype == torch.float32 else 0.3)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    chat = [{"role": "user", "content": "hi"}]
    assert "hi" in tokenizer.apply_chat_template(chat, tokenize=False)


def test_an_export_fills_an_empty_folder(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder stays: it may be a mount point, the current folder or a link."""
    here, link = tmp_path / "here", tmp_path / "link"
    here.mkdir()
    monkeypatch.chdir(here)
    run("export", "a", ".", "--path", path)
    assert {file.name for file in Path.cwd().iterdir()} >= {ADAPTER_FILE, CONFIG_FILE}
    (tmp_path / "elsewhere").mkdir()
    link.symlink_to(tmp_path / "elsewhere")
    run("export", "a", link, "--path", path)
    assert link.is_symlink() and (tmp_path / "elsewhere" / ADAPTER_FILE).exists()
    assert not list(tmp_path.glob("**/.*.tmp"))


def test_an_export_leaves_what_is_there(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    said = refused(capsys, "export", "a", tmp_path / "out", "--path", path)
    assert "exists already" in said
    said = refused(capsys, "export", "a@7", tmp_path / "new", "--path", path)
    assert "no step 7; kept steps: 0, 1, 2" in said
    said = refused(capsys, "export", "nobody", tmp_path / "new", "--path", path)
    assert "'nobody' is no model" in said and "p/a" in said
    add_model(path, path / "p/models/a/checkpoints/0000", name="x")
    (path / "r" / "models").mkdir(parents=True)
    (path / "p" / "models" / "x").rename(path / "r" / "models" / "a")
    assert "one of several" in refused(capsys, "export", "a", tmp_path / "new", "--path", path)
    (path / "p/models/a/checkpoints/0002" / ADAPTER_FILE).write_bytes(b"rot")
    assert "SHA-256" in refused(capsys, "export", "p/a", tmp_path / "new", "--path", path)
    assert {folder.name for folder in tmp_path.iterdir()} == {"path", "out"}


def test_a_quantised_base_is_not_merged(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tmp_path / "base"
    make_model("qwen3", base)
    config = json.loads((base / "config.json").read_text())
    run("export", "a", tmp_path / "adapter", "--path", path)
    record = path / "p/models/a/model.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"base_model": str(base)}))
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "bitsandbytes"}}))
    said = refused(capsys, "export", "a", tmp_path / "out", "--merge", "--path", path)
    assert "is quantised" in said and not (tmp_path / "out").exists()


class Hub(BaseHTTPRequestHandler):
    """What of the hub's API an upload of small files needs."""

    files: dict[str, bytes]
    created: list[dict[str, Any]]
    is_closed: bool

    @property
    def server_url(self) -> str:
        return f"http://{self.headers['host']}"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.is_closed:
            return self.answer({"error": "Invalid username or password."}, 401)
        if self.path == "/api/repos/create":
            self.created.append(json.loads(body))
            return self.answer({"url": f"{self.server_url}/me/agent"})
        if self.path.endswith("/preupload/main"):
            asked = json.loads(body)["files"]
            files = [{"path": file["path"], "uploadMode": "regular"} for file in asked]
            files = [file | {"shouldIgnore": False, "oid": None} for file in files]
            return self.answer({"files": files})
        if self.path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.files[line["value"]["path"]] = content
            commit = {"commitUrl": f"{self.server_url}/me/agent/commit/1", "commitOid": "1"}
            return self.answer(commit | {"pullRequestUrl": None, "success": True})
        return self.answer({"error": f"no route {self.path}"}, 404)

    def do_GET(self) -> None:
        self.answer({"id": "me/agent", "sha": "0", "siblings": []})

    def answer(self, body: Any, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    class OneHub(Hub):
        files, created, is_closed = {}, [], False

    server = HTTPServer(("127.0.0.1", 0), OneHub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    from huggingface_hub import constants

    # The variable HF_ENDPOINT, which the hub's client reads when it is first imported.
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield OneHub
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_push_uploads_the_folder_to_a_private_repository(
    path: Path, tmp_path: Path, hub: type[Hub], capsys: pytest.CaptureFixture[str]
) -> None:
    run("export", "a", tmp_path / "out", "--push", "me/agent", "--path", path)
    assert hub.files == {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert hub.created[0]["name"] == "agent" and hub.created[0].get("private", True)
    assert "me/agent" in capsys.readouterr().out
    hub.is_closed = True
    said = refused(capsys, "export", "a", tmp_path / "two", "--push", "me/agent", "--path", path)
    assert "was written, and not pushed" in said and "hf auth login" in said
    assert f"hf upload me/agent {tmp_path / 'two'}" in said, "the same export again would be refused"
    assert "hf_secret" not in said and (tmp_path / "two" / ADAPTER_FILE).exists()
    said = refused(capsys, "export", "a", tmp_path / "three", "--push", "../x", "--path", path)
    assert "not pushed to '../x'" in said


# --- import -------------------------------------------------------------------------------------------------------


def test_an_exported_adapter_comes_back_as_another_model(path: Path, tmp_path: Path) -> None:
    run("export", "a", tmp_path / "out", "--path", path)
    run("import", tmp_path / "out", "--model", "q/b", "--path", path)
    folder = model(path, "b")
    assert (folder.steps(), folder.read().lora) == ([0], TINY_LORA)
    assert folder.read().base_model == "art/tiny"
    assert folder.path.stat().st_mode & 0o077 == 0, "as the server writes it"
    assert same_weights(folder.checkpoint_dir(0), tmp_path / "out")


def test_a_step_that_was_set_aside_comes_back_with_its_number(path: Path, tmp_path: Path) -> None:
    aside = model(path, "a", "p").set_aside(2, "rolled-back")
    import_it = ("import", aside, "--base-model", "art/tiny", "--model")
    run(*import_it, "q/b", "--path", path)
    folder = model(path, "b")
    assert folder.steps() == [2] and (folder.checkpoint_dir(2) / OPTIMIZER_FILE).exists()
    assert folder.read_checkpoint(2).optimizer_steps == 6
    (aside / OPTIMIZER_FILE).unlink()  # as the server does when it makes newer steps
    with serving(tmp_path / "other") as (url, _):
        run(*import_it, "q/b", "--url", url)
    folder = model(tmp_path / "other", "b")
    assert folder.steps() == [2] and folder.read_checkpoint(2).optimizer_steps == 6


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "import", tmp_path / "no", "--model", "q/b", "--path", tmp_path)
    assert f"there is no folder {tmp_path / 'no'}" in said


@pytest.mark.parametrize("text", ["{", "[1]", "7", '{"step": -1}', '{"step": 0, "files": 1}'])
def test_a_folder_with_a_wrong_description_makes_no_model(
    text: str, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("export", "a", tmp_path / "out", "--path", path)
    (tmp_path / "out" / DESCRIPTION_FILE).write_text(text)
    said = refused(capsys, "import", tmp_path / "out", "--model", "q/b", "--path", path)
    assert DESCRIPTION_FILE in said and not (path / "q").exists()


def test_an_adapter_that_does_not_fit_makes_no_model(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model("qwen3", tmp_path / "base")
    write_first_checkpoint(str(tmp_path / "base"), TINY_LORA, 0, tmp_path / "other")
    import_it = ("import", tmp_path / "other", "--path", path, "--model")
    said = refused(capsys, *import_it, "q/b", "--base-model", "art/tiny")
    assert "does not fit base model 'art/tiny'" in said
    assert "project" in refused(capsys, *import_it, "b")
    assert "not a name" in refused(capsys, *import_it, "q/../b")
    by_case = refused(capsys, *import_it, "P/b", "--base-model", "art/tiny")
    assert "project 'P' differs from the existing project 'p' by case only" in by_case
    assert "cannot be read" in refused(capsys, "import", tmp_path, "--path", path, "--model", "q/b")
    (tmp_path / "other" / ADAPTER_FILE).unlink()
    (tmp_path / "other" / "adapter_model.bin").write_bytes(b"\x80\x04pickle")
    assert "safe_serialization=True" in refused(capsys, *import_it, "q/b")
    assert not (path / "q").exists()


def test_a_folder_in_which_a_server_works_is_left_alone(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("export", "a", tmp_path / "out", "--path", path)
    lock_folder(ServerConfig(path=path).server_dir, path)
    said = refused(capsys, "import", tmp_path / "out", "--model", "q/b", "--path", path)
    assert "an art-server works in" in said and "--url" in said


def test_the_best_and_the_newest_step_are_named_by_words(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model(path, "a", "p").history_file.unlink()
    assert "p/a has no best step" in refused(capsys, "export", "p/a@best", tmp_path / "no", "--path", path)
    rewards = [{"step": step, "val/reward": reward} for step, reward in enumerate((0.1, 0.7, 0.7))]
    model(path, "a", "p").history_file.write_text("".join(json.dumps(row) + "\n" for row in rewards))
    run("export", "a@best", tmp_path / "best", "--path", path)
    run("copy", "p/a@latest", f"file://{tmp_path}/latest", "--path", path)
    with serving(path) as (url, _):
        run("export", "a@best", tmp_path / "served", "--url", url)
    checkpoints = path / "p/models/a/checkpoints"
    for folder, step in (("best", "0001"), ("served", "0001"), ("latest", "0002")):
        assert same_weights(tmp_path / folder, checkpoints / step), folder
    said = refused(capsys, "export", "a@newest", tmp_path / "no", "--path", path)
    assert "'newest' is not a step: write a@NUMBER, @best or @latest" in said


# --- a server -----------------------------------------------------------------------------------------------------


def test_a_download_that_breaks_begins_anew(path: Path, tmp_path: Path) -> None:
    with serving(path, after=100_000) as (url, server):
        run("export", "a@1", tmp_path / "out", "--url", url)
    assert same_weights(tmp_path / "out", path / "p/models/a/checkpoints/0001")
    assert server.seen == ["GET", "GET"]


def test_an_upload_that_breaks_begins_anew(path: Path, tmp_path: Path) -> None:
    source, other = path / "p/models/a/checkpoints/0002", tmp_path / "other"
    with serving(other, after=70_000) as (url, server):
        run("import", source, "--model", "q/b", "--base-model", "art/tiny", "--url", url)
    folder = model(other, "b")
    assert folder.steps() == [2] and same_weights(folder.checkpoint_dir(2), source)
    assert server.seen == ["PUT", "PUT"]


def test_the_key_is_that_of_the_environment(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(path, api_keys=(ApiKey(key="secret"),)) as (url, _):
        said = refused(capsys, "export", "a", tmp_path / "out", "--url", url)
        assert "no API key" in said
        monkeypatch.setenv("ART_API_KEY", "secret")
        run("export", "a", tmp_path / "out", "--url", f"{url}/v1")
    assert (tmp_path / "out" / ADAPTER_FILE).exists()


def test_a_server_s_refusal_is_reported_in_its_words(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_first_checkpoint(str(TINY_DIR), TINY_LORA, 0, tmp_path / "out")
    import_it = ("import", tmp_path / "out", "--base-model", "art/tiny", "--model", "p/a")
    with serving(path) as (url, _):
        said = refused(capsys, *import_it, "--url", url)
        assert "has a step 0, with other content" in said
        said = refused(capsys, "export", "nobody", tmp_path / "x", "--url", url)
        assert "'nobody' is no model of" in said and "p/a" in said
    said = refused(capsys, "export", "a", tmp_path / "x", "--url", "http://127.0.0.1:9")
    assert "no answer from the server" in said


# --- addresses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_checkpoint_goes_to_an_address_and_back(scheme: str, path: Path, tmp_path: Path) -> None:
    address = f"{scheme}://{tmp_path}/backup/a/0001/"
    for _ in range(2):  # what is there already is left as it is
        run("copy", "p/a@1", address, "--path", path)
    names = {Path(file["name"]).name for file in listed(address)}
    assert names == {ADAPTER_FILE, CONFIG_FILE, OPTIMIZER_FILE, DESCRIPTION_FILE}
    other = tmp_path / "other"
    run("copy", address, "q/b", "--path", other)
    folder, source = model(other, "b"), model(path, "a", "p")
    assert (folder.steps(), folder.read().lora) == ([1], source.read().lora)
    assert folder.read_checkpoint(1).files == source.read_checkpoint(1).files
    with serving(tmp_path / "third") as (url, _):
        run("copy", address, "q/c", "--url", url)
        run("copy", "q/c", f"{scheme}://{tmp_path}/again", "--url", url)
    folder = model(tmp_path / "third", "c")
    assert folder.steps() == [1] and folder.read_checkpoint(1).optimizer_steps == 3


def test_of_a_folder_of_checkpoints_the_newest_complete_one_is_copied(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address, back = f"file://{tmp_path}/there", ("q/b", "--path", tmp_path / "other")
    assert "holds no complete" in refused(capsys, "copy", address, *back, code=3)
    for step in (1, 2):
        run("copy", f"p/a@{step}", f"{address}/{step:04d}", "--path", path)
    (tmp_path / "there" / "0010").mkdir()  # its copy was interrupted
    (tmp_path / "there" / "notes").mkdir()
    run("copy", address, *back)
    assert model(tmp_path / "other", "b").steps() == [2]
    run("copy", address, "q/c", *back[1:], "--not-after", 1)
    assert model(tmp_path / "other", "c").steps() == [1]
    for source, step in ((address, 0), (f"{address}/0002", 1)):
        said = refused(capsys, "copy", source, *back, "--not-after", step, code=3)
        assert f"holds no complete checkpoint up to step {step}" in said
    said = refused(capsys, "copy", "p/a", address, "--path", path, "--not-after", 1)
    assert "write MODEL@k" in said


def listed(address: str) -> list[dict[str, Any]]:
    system, root = fsspec.core.url_to_fs(address)
    return system.ls(root, detail=True)


def test_at_an_address_there_is_a_whole_checkpoint_or_none(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, back = f"file://{tmp_path}/there", ("q/b", "--path", tmp_path / "other")
    put_file = LocalFileSystem.put_file

    def breaks(self: Any, source: str, target: str, **options: Any) -> None:
        if target.endswith(ADAPTER_FILE):
            raise ConnectionError("lost")
        put_file(self, source, target, **options)

    with monkeypatch.context() as broken:
        broken.setattr(LocalFileSystem, "put_file", breaks)
        assert "lost" in refused(capsys, "copy", "a@1", address, "--path", path)
    assert (tmp_path / "there" / CONFIG_FILE).exists()
    assert "holds no complete checkpoint" in refused(capsys, "copy", address, *back, code=3)
    run("copy", "a@1", address, "--path", path)
    assert "holds another" in refused(capsys, "copy", "a@2", address, "--path", path)
    (tmp_path / "there" / ADAPTER_FILE).write_bytes(b"rot")
    assert "SHA-256 differs" in refused(capsys, "copy", address, *back)
    (tmp_path / "there" / ADAPTER_FILE).unlink()
    assert "holds no complete checkpoint" in refused(capsys, "copy", address, *back)
    (tmp_path / "there" / DESCRIPTION_FILE).write_text('{"files": {"../../x": "0"}}')
    assert "not a valid description" in refused(capsys, "copy", address, *back)
    assert not (tmp_path / "other" / "q").exists()


def test_what_is_no_address_is_reported(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "an address with '://'" in refused(capsys, "copy", "p/a", "p/b", "--path", path)
    assert "an address with '://'" in refused(capsys, "copy", "s3://a/b", "s3://c/d")
    assert "gcsfs" in refused(capsys, "copy", "p/a", "gs://bucket/a", "--path", path)
    assert "cannot be used" in refused(capsys, "copy", "p/a", "nosuch://a", "--path", path)


def test_a_store_that_fails_is_not_an_empty_one(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoCredentials(Exception):
        """Of a package below fsspec, as s3fs raises them."""

    def refuse(*_: object, **__: object) -> None:
        raise NoCredentials("log in first")

    monkeypatch.setattr(LocalFileSystem, "exists", refuse)
    for arguments in (("file:///there", "q/b"), ("p/a", "file:///there")):
        said = refused(capsys, "copy", *arguments, "--path", path)
        assert "file:///there cannot be used (NoCredentials: log in first): write an address such as" in said


def test_a_copied_description_writes_no_other_file(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, victim = tmp_path / "there", tmp_path / "victim"
    run("copy", "p/a@1", f"file://{there}", "--path", path)
    described = json.loads((there / DESCRIPTION_FILE).read_text())
    victim.write_text("mine")
    for name in (str(victim), "../../victim"):
        (tmp_path / "evil").write_text("evil")
        described["files"] = {name: "0" * 64, **described["files"]}
        (there / DESCRIPTION_FILE).write_text(json.dumps(described))
        said = refused(capsys, "copy", f"file://{there}", "q/b", "--path", tmp_path / "other")
        assert "which is not a file of a checkpoint" in said
        assert victim.read_text() == "mine"


def test_a_step_is_copied_again_after_its_optimizer_state_was_deleted(path: Path) -> None:
    address = f"memory://{path}/again"
    run("copy", "p/a@1", address, "--path", path)
    (path / "p/models/a/checkpoints/0001" / OPTIMIZER_FILE).unlink()
    run("copy", "p/a@1", address, "--path", path)
    assert any(file["name"].endswith(OPTIMIZER_FILE) for file in listed(address))


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_proxy_that_does_not_reach_the_server_is_asked_again(status: int) -> None:
    with pytest.raises(Unavailable):
        http_transfer.raise_refusal(httpx.Response(status, text="<html>bad gateway"))


# --- an export that is long, or cut off ---------------------------------------------------------------------------


def base_folder(root: Path, **generation: object) -> Path:
    """A copy of art/tiny, with another generation_config.json."""
    shutil.copytree(TINY_DIR, root / "base")
    (root / "base" / "generation_config.json").write_text(json.dumps(generation))
    return root / "base"


@pytest.mark.parametrize(
    "generation",
    [
        {"do_sample": False, "temperature": 0.0, "top_p": 0.9},
        {"temperature": -1},
        {"unknown": {"a": 1}},
    ],
)
def test_a_merge_survives_any_generation_config(generation: dict[str, Any], path: Path, tmp_path: Path) -> None:
    """Each can be served, and transformers would not write it."""
    content = model(path, "a", "p").checkpoint_dir(2)
    run("import", content, "--model", "q/b", "--base-model", base_folder(tmp_path, **generation), "--path", path)
    run("export", "b", tmp_path / "out", "--merge", "--path", path)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == generation, "as it was"


def test_an_export_has_the_chat_template_of_the_server(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    description = path / "p/models/a/checkpoints/0002" / DESCRIPTION_FILE
    description.write_text(json.dumps(json.loads(description.read_text()) | {"chat_template": "mine: {{ messages }}"}))
    run("export", "p/a", tmp_path / "merged", "--merge", "--path", path)
    told = capsys.readouterr().err
    assert "art: loading art/tiny" in told and "art: writing the merged model" in told
    run("export", "p/a", tmp_path / "adapter", "--path", path)
    for folder in ("merged", "adapter"):
        assert (tmp_path / folder / "chat_template.jinja").read_text() == "mine: {{ messages }}"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False).startswith("mine: ")


@pytest.mark.parametrize(
    ("number", "is_there"),
    [
        (signal.SIGTERM, False),
        (signal.SIGTERM, True),
        (signal.SIGHUP, False),
        (signal.SIGINT, False),
        (signal.SIGKILL, False),
        (signal.SIGKILL, True),
    ],
)
def test_an_export_that_is_killed_leaves_nothing(
    number: signal.Signals, is_there: bool, path: Path, tmp_path: Path
) -> None:
    """What SIGKILL leaves is deleted by the next export."""
    target = tmp_path / "new" / "out" if is_there else tmp_path / "out"
    if is_there:
        target.mkdir(parents=True)
    # The export ends in the middle of its folder.
    program = f"""
import os, signal
from art_transfer import transfer
from art_watch.terminal.cli import main
def write(content, description, folder):
    (folder / "half").write_text("x")
    os.kill(os.getpid(), {int(number)})
    signal.pause()
transfer.write_merged = write
main(["export", "p/a", {str(target)!r}, "--merge", "--path", {str(path)!r}])
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    before = {"path", "new"} if is_there else {"path"}
    if number == signal.SIGKILL:
        assert ended.returncode == -signal.SIGKILL and list(tmp_path.rglob(".*.tmp"))
    else:
        assert ended.returncode == 128 + number, ended.stderr
        assert {file.name for file in tmp_path.iterdir()} == before and not list(tmp_path.rglob(".*.tmp"))
        assert "Traceback" not in ended.stderr
    run("export", "p/a", target, "--path", path)
    assert (target / ADAPTER_FILE).exists() and not list(tmp_path.rglob(".*.tmp"))


def test_an_export_that_runs_is_left_alone(path: Path, tmp_path: Path) -> None:
    with transfer.unfinished_folder(tmp_path) as running:
        run("export", "p/a", tmp_path / "out", "--path", path)
        assert running.is_dir()
    assert not running.exists()


def test_a_target_that_cannot_be_written(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for target in (tmp_path / "file" / "out", Path("/proc/nothing/out")):
        assert "name another folder" in refused(capsys, "export", "p/a", target, "--path", path)
    assert "File name too long" in refused(capsys, "export", "p/a", tmp_path / ("x" * 300), "--path", path)
