"""Each command over a folder and over HTTP, its errors, and what it prints into a pipe."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from art_protocol.wire import About, LoRAConfig
from art_server.settings import ApiKey
from art_server.store import files
from art_server.store.model_folder import ModelFolder, ModelRecord
from art_watch.view import make_view
from tests.http_server import served
from tests.makers.demo import log, make_demo
from tests.quick.api.idle_server import make
from tests.quick.models.house import House
from tests.quick.watch.terminal.conftest import Ran
from tests.waiting import PATIENCE_SECONDS

Run = Callable[..., Ran]
ROOT = Path(__file__).parents[4]
MODEL, OTHER = "demo/webnav-8b", "demo/webnav-lr2e5"


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["status", MODEL],
        ["runs", "--sort", "reward"],
        ["checkpoints", MODEL],
        ["show", MODEL],
        ["show", f"{MODEL}@1", "--sort", "reward", "--limit", "2"],
        ["show", f"{MODEL}@best", "--group", "0"],
        ["show", f"{MODEL}@1", "--group", "3", "--rollout", "4"],
        ["show", MODEL, "--split", "val", "--group", "0", "--text", "OS 482"],
        ["plot", MODEL, OTHER, "--metric", "train/reward,loss/entropy"],
    ],
    ids=" ".join,
)
def test_a_folder_and_its_server_give_the_same_json(run: Run, folder: Path, url: str, arguments: list[str]) -> None:
    documents: list[dict[str, Any]] = []
    for source in (["--path", folder], ["--url", f"{url}/v1"]):
        code, out, err = run(*arguments, "--json", *source)
        assert (code, err) == (0, "") and out.count("\n") == 1
        documents.append(json.loads(out))
        documents[-1].pop("time", None)
    assert documents[0] == documents[1]


def test_json_has_the_fields_that_programs_read(run: Run, folder: Path) -> None:
    def read(*arguments: str) -> dict[str, Any]:
        return json.loads(run(*arguments, "--json", "--path", folder).out)

    status = read("status")
    assert set(status) == {"models", "time", "live"} and status["live"] is None
    (model, _) = read("runs")["models"]
    assert {"id", "base_model", "step", "reward", "rewards", "val_reward", "best", "last_at"} <= set(model)
    step = read("show", f"{MODEL}@1", "--group", "0", "--rollout", "1")
    assert (step["model"], step["split"], step["step"]) == (MODEL, "train", 1)
    (rollout,) = step["rollouts"]
    assert (rollout["group"], rollout["index"]) == (0, 1)
    assert {"reward", "metrics", "metadata", "logs", "histories", "sequences"} <= set(rollout)
    curves = read("plot", MODEL)
    assert curves["metrics"] == ["train/reward", "val/reward"]
    assert len(curves["models"][MODEL]["metrics"]["val/reward"]) == 6


def test_the_steps_of_a_model_are_listed_with_the_best_and_the_newest(run: Run, folder: Path, url: str) -> None:
    lines = run("checkpoints", "webnav-8b", "--path", folder).out.splitlines()
    assert lines[0].split() == ["step", "reward", "val", "size", "age"]
    steps = [line.split()[0] for line in lines[1:]]
    assert steps == ["1", "2", "3", "4", "5", "6"] and all(" 44." in line and " KiB " in line for line in lines[1:])
    assert lines[-1].split()[-1] == "newest" and sum("best" in line for line in lines) == 1
    assert run("checkpoints", "webnav-8b", "--url", url).out.splitlines()[-1].split()[-1] == "serves"


def test_a_run_is_shown_with_what_it_cost(run: Run, folder: Path) -> None:
    out = run("status", "webnav-8b", "--path", folder).out
    assert out.startswith("demo/webnav-8b, step 6, base model Qwen/Qwen3-8B\nreward ")
    assert re.search(
        r"\ntrained: [\d,]+ tokens in [\d,]+ of 6 steps\nsampled for training: [\d,]+ tokens in [\d,]+ rollouts\n", out
    )
    assert "\ntime in steps: " in out and "\nprice: unknown" in out
    record = ModelFolder(folder, "demo", "webnav-8b")
    record.write_about(About(price_per_hour=2.0))
    try:
        assert re.search(r"\nprice: [\d.]+ at 2 an hour\n", run("status", "webnav-8b", "--path", folder).out)
    finally:
        record.write_about(About())


def test_a_running_server_takes_the_price_of_an_hour(run: Run, tmp_path: Path) -> None:
    make_demo(tmp_path, runs=1, steps=2)
    record = ModelFolder(tmp_path, "demo", "webnav-8b")
    record.write_about(About(tags=["best"]))
    with served(House(tmp_path).app, lifespan="off") as url:
        out = run("status", MODEL, "--price-per-hour", "2.5", "--url", url).out
    assert re.search(r"\nprice: [\d.]+ at 2.5 an hour\n", out)
    assert record.read_about() == About(tags=["best"], price_per_hour=2.5)


def test_runs_sort_by_name_reward_and_time(run: Run, folder: Path) -> None:
    def order(sort: str) -> list[dict[str, Any]]:
        out = run("runs", "--sort", sort, "--json", "--path", folder).out
        return json.loads(out)["models"]

    assert [model["id"] for model in order("name")] == [MODEL, OTHER]
    rewards = [model["reward"] for model in order("reward")]
    assert rewards == sorted(rewards, reverse=True)
    times = [model["last_at"] for model in order("time")]
    assert times == sorted(times, reverse=True) and len(set(times)) == 2


def test_into_a_pipe_nothing_is_cut_off_or_coloured(run: Run, folder: Path) -> None:
    table = run("show", f"{MODEL}@1", "--path", folder).out
    full = run("show", f"{MODEL}@1", "--group", "0", "--rollout", "0", "--path", folder).out
    assert "\x1b" not in table + full and "…" not in table + full
    assert "\nYou are a travel agent's assistant. Answer with a tool call or" in full
    assert "never invent a flight that the tool did not return." in full.lower()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["show", "none"], 1, "'none' is no model of .*; known models: demo/webnav-8b, demo/webnav-lr2e5"),
        (["show", f"{MODEL}@7"], 1, r"split 'train' at step 7; newest steps .*: 6, 5, 4"),
        (["show", f"{MODEL}@{'9' * 5000}"], 2, "is no step: write"),
        (["show", f"{MODEL}@x"], 2, "'x' is no step: write demo/webnav-8b@NUMBER"),
        (["show", MODEL, "--split", "none"], 1, "rollouts of split 'none'; .*splits: train, val"),
        (["show", MODEL, "--split", "../x"], 2, "--split"),
        (["show", MODEL, "--group", "99"], 1, "has no group 99"),
        (["show", MODEL, "--group", "0", "--rollout", "99"], 1, "no group 0, rollout 99"),
        (["show", MODEL, "--group", "0", "--text", "zzz"], 1, "no group 0 with this text"),
        (["show", MODEL, "--rollout", "1"], 2, "add --group"),
        (["show", MODEL, "--group", "-1"], 2, "-1 must be at least 0"),
        (["plot", f"{MODEL}@3"], 2, "without '@3'"),
        (["plot", MODEL, "--metric", "train/rewards"], 1, "metrics: train/reward"),
        (["checkpoints", f"{MODEL}@3"], 2, "about a whole model: write demo/webnav-8b without '@3'"),
        (["status", "none"], 1, "'none' is no model of"),
        (["rollback", MODEL, "1"], 2, "only a running server has models that can be rolled back"),
        (["status", MODEL, "--price-per-hour", "2"], 1, "only a running server has runs whose price can be set"),
        (["status", "--price-per-hour", "2"], 2, "--price-per-hour is of a run: name its MODEL"),
        (["jobs"], 1, "only a running server has jobs"),
        (["jobs", "--cancel", "1"], 1, "only a running server has jobs"),
    ],
)
def test_an_error_has_its_code_and_names_the_remedy(
    run: Run, folder: Path, url: str, arguments: list[str], code: int, message: str
) -> None:
    ended, out, err = run(*arguments, "--path", folder)
    assert (ended, out) == (code, "") and re.search(message, err), err
    if not {"jobs", "rollback"} & set(arguments) and arguments[1:] != [MODEL, "--price-per-hour", "2"]:
        again = run(*arguments, "--url", url)
        assert again.code == code and re.search(message, again.err), again.err


def test_a_page_without_a_server_has_no_jobs(run: Run, url: str) -> None:
    code, _, err = run("jobs", "--url", url)
    assert code == 1 and "`art view`, which has no jobs" in err


def test_a_name_of_two_projects_is_asked_back(run: Run, tmp_path: Path) -> None:
    for project in ("p", "q"):
        record = ModelRecord(name="a", project=project, base_model="b", lora=LoRAConfig())
        ModelFolder(tmp_path, project, "a").create(record, tmp_path / "engine.log")
    code, _, err = run("show", "a", "--path", tmp_path)
    assert code == 1 and "one of several models" in err and "p/a, q/a" in err


def test_an_empty_folder_has_no_models_and_a_missing_one_is_an_error(run: Run, tmp_path: Path) -> None:
    assert run("runs", "--path", tmp_path) == (0, "no models yet\n", "")
    assert json.loads(run("runs", "--json", "--path", tmp_path).out) == {"models": []}
    assert "no server runs here" in run("status", "--path", tmp_path).out
    assert "models: none" in run("show", "a", "--path", tmp_path).err
    code, _, err = run("runs", "--path", tmp_path / "none")
    assert code == 1 and "there is no folder" in err and "--path" in err


def test_without_a_folder_the_server_of_a_backend_is_read(
    run: Run, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ART_SERVER_URL", url)
    assert "webnav-8b" in run("runs").out
    assert "there is no folder" in run("runs", "--path", tmp_path / "other").err, "a folder that was named is meant"
    monkeypatch.setenv("ART_SERVER_URL", "http://127.0.0.1:9")
    code, _, err = run("runs")
    assert code == 1 and "no folder .art, and no server at http://127.0.0.1:9" in err


def test_art_alone_lists_its_commands(run: Run) -> None:
    code, out, _ = run()
    assert code == 0 and all(name in out for name in ("status", "runs", "show", "plot", "jobs", "view", "run"))


def test_a_model_without_steps_can_be_shown(run: Run, tmp_path: Path) -> None:
    record = ModelRecord(name="a", project="p", base_model="b", lora=LoRAConfig())
    ModelFolder(tmp_path, "p", "a").create(record, tmp_path / "engine.log")
    assert run("runs", "--path", tmp_path).code == 0
    assert run("status", "--path", tmp_path).code == 0
    shown, plotted = (run(command, "a", "--path", tmp_path) for command in ("show", "plot"))
    assert shown.code == 1 and "newest steps with rollouts: none" in shown.err
    assert plotted.code == 1 and "metrics: none" in plotted.err
    assert run("show", "a@best", "--path", tmp_path).code == 1


def test_numbers_that_json_cannot_hold_are_null(run: Run, tmp_path: Path) -> None:
    record = ModelRecord(name="a", project="p", base_model="b", lora=LoRAConfig())
    model = ModelFolder(tmp_path, "p", "a")
    model.create(record, tmp_path / "engine.log")
    log(model, 1, {"loss/train": float("nan"), "train/reward": float("inf")})
    plot = ("plot", "a", "--metric", "loss/train", "--json")
    with served(make_view(tmp_path)) as url:
        for source in (["--path", tmp_path], ["--url", url]):
            document = json.loads(run(*plot, *source).out)
            assert document["models"]["p/a"]["metrics"] == {"loss/train": [None]}
            assert json.loads(run("runs", "--json", *source).out)["models"][0]["reward"] is None
    assert run("plot", "a", "--metric", "loss/train", "--path", tmp_path).code == 0
    assert run("runs", "--path", tmp_path).code == 0


def test_a_model_with_supervised_steps_only_is_shown_by_its_loss(run: Run, tmp_path: Path) -> None:
    record = ModelRecord(name="a", project="p", base_model="b", lora=LoRAConfig())
    model = ModelFolder(tmp_path, "p", "a")
    model.create(record, tmp_path / "engine.log")
    for step, loss in ((1, 2.5), (2, 0.00125)):
        log(model, step, {"loss/train": loss, "loss/token_accuracy": 0.5, "train/reward": 0.0})
    status = run("status", "--path", tmp_path).out
    assert "loss 0.00125" in status and "0.000" not in status
    plotted = run("plot", "a", "--path", tmp_path).out
    assert "p/a loss/train" in plotted and "train/reward" not in plotted
    assert "last 0.00125, highest 2.500 at step 1" in plotted
    log(model, 3, {"loss/train": 0.1, "train/reward": 0.5})
    assert "0.500" in run("status", "--path", tmp_path).out
    assert "train/reward" in run("plot", "a", "--path", tmp_path).out


# --- where it reads ---


def test_the_server_that_holds_the_folder_s_lock_is_read(run: Run, folder: Path, url: str, tmp_path: Path) -> None:
    files.write_json(tmp_path / ".server" / "address.json", {"url": url, "pid": 1})
    assert json.loads(run("runs", "--json", "--path", tmp_path).out) == {"models": []}
    lock = files.lock_folder(tmp_path / ".server", tmp_path)
    try:
        models = json.loads(run("runs", "--json", "--path", tmp_path).out)["models"]
        assert [model["id"] for model in models] == [MODEL, OTHER]
        files.write_json(tmp_path / ".server" / "address.json", {"url": "http://127.0.0.1:9"})
        code, out, err = run("runs", "--json", "--path", tmp_path)
        assert (code, json.loads(out)) == (0, {"models": []})
        assert "no answer from http://127.0.0.1:9" in err and "Reading the files in" in err
        for broken in ("{", "[]", "{}"):
            (tmp_path / ".server" / "address.json").write_text(broken)
            assert run("runs", "--path", tmp_path) == (0, "no models yet\n", "")
    finally:
        os.close(lock)


def test_a_server_that_does_not_answer_is_not_found(run: Run) -> None:
    for command in (["runs"], ["jobs"]):
        code, out, err = run(*command, "--url", "http://127.0.0.1:9")
        assert (code, out) == (1, "") and "no answer from http://127.0.0.1:9" in err
        assert err.count("\n") == 1


@pytest.mark.parametrize("address", ["localhost:7623", "http://[", "ftp://x", "http://"])
def test_an_address_that_is_none_is_bad_use(run: Run, address: str) -> None:
    code, out, err = run("runs", "--url", address)
    assert (code, out) in ((2, ""), (1, "")) and address in err and err.count("\n") == 1


def test_a_key_is_sent_and_never_printed(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = (ApiKey(key="good"), ApiKey(key="infer", scopes=frozenset({"infer"})))
    app, server = make(tmp_path, api_keys=keys)
    with served(app, lifespan="off") as url:
        for key, code, message in (
            ("good", 0, ""),
            ("", 2, "no API key"),
            ("wrong-key", 2, "unknown API key"),
            (
                "infer",
                2,
                "this key lacks the scope 'train': ask the server's owner for one with this scope (the key is read from ART_API_KEY)",
            ),
            ("two\nlines-key", 2, "characters that no key has"),
            ("schlüssel-key", 2, "characters that no key has"),
        ):
            monkeypatch.setenv("ART_API_KEY", key)
            ran = run("runs", "--url", url)
            assert ran.code == code and message in ran.err and "-key" not in ran.err + ran.out
    server.close()


def test_a_program_that_is_no_art_server_is_named(run: Run) -> None:
    app = FastAPI()
    app.get("/api/look/overview")(lambda: "x")
    with served(app) as url:
        assert "is no art-server" in run("show", "a", "--url", url + "/v1/other").err


# --- processes ---


@contextlib.contextmanager
def started(folder: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    code = "from art_watch.terminal.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments, "--path", str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_reader_that_ends_early_is_no_error(folder: Path) -> None:
    with started(folder, "show", MODEL, "--json") as writer:
        assert writer.stdout is not None and writer.stderr is not None
        writer.stdout.close()
        assert writer.wait(PATIENCE_SECONDS) == 1 and writer.stderr.read() == ""


RUN_EACH = """
import json, sys
from art_watch.terminal.cli import main
for arguments in json.loads(sys.argv[1]):
    try:
        main(arguments)
    except SystemExit as end:
        print(end.code)
"""


def run_without(packages: list[str], commands: list[list[str]], folder: Path) -> "subprocess.CompletedProcess[str]":
    """Runs commands of `art` in a process without these packages, which prints their codes."""
    for package in packages:
        (folder / f"{package}.py").write_text(f"raise ModuleNotFoundError(name='{package}')")
    env = {"PYTHONPATH": f"{folder}:{ROOT}:{ROOT / 'art_client'}", "PATH": ""}
    program = [sys.executable, "-c", RUN_EACH, json.dumps(commands)]
    return subprocess.run(program, env=env, cwd=folder, capture_output=True, text=True, check=True)


def test_without_its_extra_a_command_says_what_to_install(folder: Path, tmp_path: Path) -> None:
    source = ["--path", str(folder)]
    commands = [["show", MODEL, "--group", "0", *source], ["plot", MODEL, *source], ["view"]]
    ran = run_without(["numpy", "plotext", "uvicorn"], commands, tmp_path)
    assert ran.stdout.splitlines() == ["2"] * 3
    lines = ran.stderr.splitlines()
    assert [("'numpy'" in line, re.findall(r"'\.(\[\w+\])'", line)) for line in lines] == [
        *((True, ["[terminal]"]), (False, ["[terminal]"]), (False, ["[view]"])),
    ]


def test_without_rich_there_is_json(folder: Path, tmp_path: Path) -> None:
    source = ["--path", str(folder)]
    tables = [["runs"], ["status"], ["plot", MODEL]]
    ran = run_without(
        ["rich", "numpy"], [["runs", *source], *([*table, "--json", *source] for table in tables)], tmp_path
    )
    code, *documents = ran.stdout.splitlines()
    assert code == "2" and ran.stderr.count("\n") == 1 and "'.[terminal]'" in ran.stderr
    assert all(map(json.loads, documents)) and len(documents) == len(tables)


def test_the_help_of_the_server_loads_no_terminal() -> None:
    code = "import sys, art_server.cli; print('rich' in sys.modules, 'art_watch.terminal.run' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False False\n"


def test_view_needs_a_free_port_and_a_folder_with_models(run: Run, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = run("view", tmp_path, "--port", port, "--no-browser")
    assert code == 2 and "choose another port" in err
    code, _, err = run("view", tmp_path, "--port", port, "--no-browser")
    assert code == 2 and "has no models" in err
