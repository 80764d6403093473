"""Trackers: each with its real library, without network; and what a failing one costs."""

import asyncio
import importlib
import json
import logging
import os
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall

import art
from art import tracing
from art.reporting import group_rows
from art_protocol import tracking
from art_protocol.tracking import StepRecord
from art_protocol.wire import FailureBody, JobReport
from art_server.errors import UsageError
from art_server.flags import parse
from art_trackers import Trackers
from art_trackers.thread import MAX_QUEUED
from tests.quick.client.conftest import MODEL_INFO
from tests.waiting import PATIENCE_SECONDS, wait_until

pytestmark = [
    pytest.mark.anyio,
    # MLflow uses what SQLAlchemy 2.1 deprecates.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy"),
]

SECONDS = PATIENCE_SECONDS
CONFIG = {"base_model": "art/tiny", "lora": {"rank": 8}, "learning_rate": 1e-5}


def make_record(step: int = 1, name: str = "agent", **changes: Any) -> StepRecord:
    metrics = {"train/reward": step / 4, "loss/train": -0.5}
    fields: dict[str, Any] = {"split": "train", "metrics": metrics, "config": CONFIG, **changes}
    return StepRecord("demo", name, step, **fields)


def make_groups() -> list[art.TrajectoryGroup]:
    def trajectory(reward: float) -> art.Trajectory:
        choice = {
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": f"worth {reward}"},
        }
        messages: Any = [{"role": "user", "content": "hi"}, choice]
        return art.Trajectory(messages_and_choices=messages, reward=reward)

    failure = FailureBody(type="ValueError", message="no answer")
    return [
        art.TrajectoryGroup([trajectory(0.0), trajectory(1.0)], exceptions=[failure]),
        art.TrajectoryGroup([trajectory(0.5)]),
    ]


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Before the libraries are imported, because they read the environment then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        # Its process takes longer on cores that other tests use.
        patch.setattr("art_trackers.wandb.INIT_SECONDS", SECONDS)
        patch.setattr("art_trackers.wandb.FINISH_SECONDS", SECONDS)
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        for name in ("WANDB_API_KEY", "WANDB_DIR", "MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID"):
            patch.delenv(name, raising=False)
        yield


def report(folder: Path, name: Any, reported: Sequence[StepRecord]) -> None:
    trackers = Trackers([name], folder)
    for record in reported:
        trackers.report(record)
    trackers.close(SECONDS)


def warnings_of(log: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in log.records
        if record.levelno >= logging.WARNING and record.name.startswith("art.")
    ]


# --- Weights & Biases ---


def read_wandb(folder: Path) -> list[Any]:
    """The records of an offline run that has ended. Its process may still write the last ones."""
    wait_until(lambda: any(record.WhichOneof("record_type") == "exit" for record in read_log(folder)))
    return read_log(folder)


def read_log(folder: Path) -> list[Any]:
    """The records in LevelDB's log format, behind a header of seven bytes."""
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    (file,) = folder.glob("*.wandb")
    data, position, content, records = file.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        rest = 32768 - position % 32768
        if rest < 7:
            position += rest
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        content += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(messages.Record.FromString(content))
            content = b""
    return records


def rows_of(records: Sequence[Any]) -> list[dict[str, Any]]:
    return [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]


def test_wandb_has_a_run_for_each_model_with_metrics_config_and_a_table(tmp_path: Path) -> None:
    groups = make_groups()
    with_rollouts = make_record(1, rollouts=lambda: group_rows(groups))
    changed = make_record(2, config={**CONFIG, "learning_rate": 2e-5})
    report(tmp_path, "wandb", [with_rollouts, make_record(7, "other"), changed])

    folders = {folder.name.rpartition("-")[2]: folder for folder in tmp_path.glob("wandb/offline-run-*")}
    assert set(folders) == {"agent", "other"}
    records = read_wandb(folders["agent"])
    (run,) = (record.run for record in records if record.WhichOneof("record_type") == "run")
    assert (run.run_id, run.project, run.display_name) == ("agent", "demo", "agent")
    rows = rows_of(records)
    assert [row["training_step"] for row in rows] == [1, 2]
    assert [row["train/reward"] for row in rows] == [0.25, 0.5]
    changes = [record.config for record in records if record.WhichOneof("record_type") == "config"]
    configs = {item.key: json.loads(item.value_json) for change in changes for item in change.update}
    assert configs == {**CONFIG, "learning_rate": 2e-5}
    table = json.loads((folders["agent"] / "files" / rows[0]["train/rollouts.path"]).read_text())
    assert table["columns"] == ["step", "group", "index", "reward", "text", "error"]
    assert table["data"] == [
        [1, 0, 0, 0.0, "user: hi\n\nassistant: worth 0.0", ""],
        [1, 0, 1, 1.0, "user: hi\n\nassistant: worth 1.0", ""],
        [1, 0, 2, None, "", "ValueError: no answer"],
        [1, 1, 0, 0.5, "user: hi\n\nassistant: worth 0.5", ""],
    ]
    assert rows_of(read_wandb(folders["other"]))[0]["training_step"] == 7
    report(tmp_path / "later", "wandb", [make_record(3)])
    (later,) = (tmp_path / "later").glob("wandb/offline-run-*-agent")
    (run,) = (record.run for record in read_wandb(later) if record.WhichOneof("record_type") == "run")
    assert run.run_id == "agent", "a restarted program continues the run"


def test_wandb_stores_neither_the_command_line_nor_a_key(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys; from pathlib import Path; from art_trackers import StepRecord, Trackers, wandb\n"
        f"Trackers.close.__defaults__ = ({SECONDS},)\n"  # cores that other tests use
        f"wandb.INIT_SECONDS = wandb.FINISH_SECONDS = {SECONDS}\n"
        "trackers = Trackers(['wandb'], Path(sys.argv[1]))\n"
        "record = StepRecord('demo', 'agent', 1, 'train', {'a': 1.0}, {})\n"
        "asyncio.run(asyncio.to_thread(trackers.report, record))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), "--api-key", "secret-of-the-command-line"]
    environment = {**os.environ, "ART_API_KEY": "secret-of-the-environment"}
    subprocess.run(command, env=environment, check=True, timeout=SECONDS)
    files = [file for file in (tmp_path / "wandb").rglob("*") if file.is_file()]
    (run,) = (file for file in files if file.suffix == ".wandb")
    assert b"training_step" in run.read_bytes(), "delivered at the program's end, without close"
    assert not [file for file in files if b"secret-of" in file.read_bytes()]


def test_wandb_without_an_account_asks_nothing_and_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys, logging; logging.basicConfig(format='%(levelname)s %(message)s')\n"
        "from pathlib import Path; from art_trackers import StepRecord, Trackers\n"
        "trackers = Trackers(['wandb'], Path(sys.argv[1]))\n"
        "for step in range(3): trackers.report(StepRecord('demo', 'agent', step, 'train', {}, {}))\n"
        f"trackers.close({SECONDS})\n"
    )
    environment = {**os.environ, "WANDB_MODE": "online", "HOME": str(tmp_path)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=SECONDS)
    told = [line for line in ran.stderr.splitlines() if line.startswith("WARNING")]
    assert len(told) == 1 and "WANDB_API_KEY" in told[0]


# --- Trackio, TensorBoard, MLflow ---


def test_trackio_has_a_run_for_each_model_which_continues(tmp_path: Path) -> None:
    report(tmp_path, "trackio", [make_record(1), make_record(5, "other"), make_record(2)])
    report(tmp_path, "trackio", [make_record(3)])

    from trackio.sqlite_storage import SQLiteStorage

    assert sorted(SQLiteStorage.get_runs("demo")) == ["agent", "other"]
    rows = SQLiteStorage.get_logs("demo", "agent")
    assert [(row["step"], row["train/reward"]) for row in rows] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    config = SQLiteStorage.get_run_config("demo", "agent")
    assert config is not None and config["base_model"] == "art/tiny"


def test_trackio_has_the_settings_of_training_also_if_the_first_report_is_of_log(
    tmp_path: Path,
) -> None:
    first = replace(make_record(1, split="val", config={"base_model": "art/tiny"}), project="validated")
    report(tmp_path, "trackio", [first, replace(make_record(2), project="validated")])

    from trackio.sqlite_storage import SQLiteStorage

    config = SQLiteStorage.get_run_config("validated", "agent")
    assert config is not None and config["learning_rate"] == 1e-5
    assert len(SQLiteStorage.get_logs("validated", "agent")) == 2


def test_tensorboard_has_the_metrics_in_event_files_and_needs_no_torch(tmp_path: Path) -> None:
    report(tmp_path, "tensorboard", [make_record(1), make_record(2)])
    report(tmp_path, "tensorboard", [make_record(3)])

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(tmp_path / "tensorboard" / "demo" / "agent"))
    events.Reload()
    rewards = [(event.step, make_ndarray(event.tensor_proto).item()) for event in events.Tensors("train/reward")]
    assert rewards == [(1, 0.25), (2, 0.5), (3, 0.75)]
    code = "import sys, tensorboard.summary; assert not {'torch', 'tensorflow'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_mlflow_has_an_experiment_with_a_run_for_each_model(tmp_path: Path) -> None:
    named = make_record(1, metrics={"train/reward": 0.25, "train/acc@1": 1.0})
    report(tmp_path, "mlflow", [named, make_record(4, "other")])
    report(tmp_path, "mlflow", [make_record(2, config={**CONFIG, "learning_rate": 2e-5})])

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("demo")
    assert experiment is not None
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {"agent", "other"}
    run = runs["agent"]
    history = client.get_metric_history(run.info.run_id, "train/reward")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.25), (2, 0.5)]
    assert run.data.metrics["train/acc_1"] == 1.0
    assert run.data.params["base_model"] == "art/tiny" and run.data.params["learning_rate"] == "1e-05"
    assert run.info.status == "FINISHED"


# --- a tracker that fails ---


class FakeRun:
    """A run of a tracker that does `act` with each record."""

    def __init__(self, act: Callable[[StepRecord], None]):
        self.log = act
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


def fake_tracker(monkeypatch: pytest.MonkeyPatch, act: Callable[[StepRecord], None]) -> list[FakeRun]:
    """Takes the place of TensorBoard."""
    runs: list[FakeRun] = []

    def open_run(record: StepRecord, folder: Path) -> FakeRun:
        runs.append(FakeRun(act))
        return runs[-1]

    module = ModuleType("art_trackers.tensorboard")
    module.open_run = open_run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "art_trackers.tensorboard", module)
    return runs


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard", "mlflow"])
def test_a_tracker_that_is_not_installed_costs_one_warning_that_names_the_extra(
    name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in [loaded for loaded in sys.modules if loaded.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)  # its import fails
    report(tmp_path, name, [make_record(1), make_record(2)])
    (told,) = warnings_of(caplog)
    assert f"pip install '.[{name}]'" in told


def test_a_folder_of_a_librarys_name_is_not_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder_without_code").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    library = importlib.import_module("art_trackers.library")
    assert not library.is_installed("folder_without_code") and library.is_installed("json")
    with pytest.raises(ImportError, match=r"'\.\[extra\]'"):
        library.import_library("folder_without_code", "extra")


def test_a_tracker_that_raises_costs_one_warning_and_gets_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    got: list[int] = []

    def act(record: StepRecord) -> None:
        if record.step < 3:
            raise ConnectionError("the tracker is down")
        got.append(record.step)

    (run,) = [fake_tracker(monkeypatch, act)]
    report(tmp_path, "tensorboard", [make_record(step) for step in range(1, 5)])
    (told,) = warnings_of(caplog)
    assert "tensorboard" in told and "the tracker is down" in told
    assert got == [3, 4] and run[0].is_closed


def test_a_warning_does_not_contain_the_password_of_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def act(record: StepRecord) -> None:
        raise ConnectionError("no route to https://me:hunter2@tracker.example:5000/api")

    fake_tracker(monkeypatch, act)
    report(tmp_path, "tensorboard", [make_record()])
    (told,) = warnings_of(caplog)
    assert "https://***@tracker.example:5000/api" in told and "hunter2" not in told


def test_a_tracker_that_hangs_costs_one_warning_and_close_returns_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hangs, free = threading.Event(), threading.Event()

    def hang(record: StepRecord) -> None:
        hangs.set()
        free.wait()

    fake_tracker(monkeypatch, hang)
    trackers = Trackers(["tensorboard"], tmp_path)
    trackers.report(make_record(0))
    hangs.wait()
    trackers.close(0.0)
    (told,) = warnings_of(caplog)
    assert "tensorboard" in told
    free.set()


def test_of_a_full_queue_the_oldest_reports_are_lost_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hangs, free, sent = threading.Event(), threading.Event(), list[int]()

    def act(record: StepRecord) -> None:
        hangs.set()
        free.wait()
        sent.append(record.step)

    fake_tracker(monkeypatch, act)
    trackers = Trackers(["tensorboard"], tmp_path)
    trackers.report(make_record(0))
    hangs.wait()
    for step in range(1, MAX_QUEUED + 5):
        trackers.report(make_record(step))
    free.set()
    trackers.close(SECONDS)
    assert sent == [0, *range(5, MAX_QUEUED + 5)]
    (told,) = warnings_of(caplog)
    assert "tensorboard" in told


def test_reports_after_close_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[int] = []
    runs = fake_tracker(monkeypatch, lambda record: got.append(record.step))
    trackers = Trackers(["tensorboard"], tmp_path)
    trackers.report(make_record(1))
    trackers.close(SECONDS)
    trackers.report(make_record(2))
    trackers.close(SECONDS)
    assert got == [1, 2] and len(runs) == 2 and all(run.is_closed for run in runs)


def test_an_unknown_tracker_is_refused() -> None:
    with pytest.raises(ValueError, match="'wandbb'"):
        art.Backend(trackers=["wandbb"])


def test_a_program_that_ends_is_not_held_up_by_a_tracker_that_hangs(tmp_path: Path) -> None:
    code = (
        "import sys, threading, types; from pathlib import Path; from art_trackers import StepRecord, Trackers\n"
        "module = types.ModuleType('hanging'); module.open_run = lambda record, folder: threading.Event().wait()\n"
        "sys.modules['art_trackers.tensorboard'] = module\n"
        "Trackers.close.__defaults__ = (0.01,)\n"
        "Trackers(['tensorboard'], Path()).report(StepRecord('p', 'a', 1, 'train', {}, {}))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# --- the backend ---


def train_answers(server: Any, answer: Any, steps: Sequence[int] = (4,), project: str = "demo") -> None:
    report = JobReport(config={"learning_rate": 1e-5}, num_trained_tokens=7)
    left = list(steps)

    def train(_: Any) -> Any:
        done = {
            "event": "done",
            "job_id": "j",
            "step": left.pop(0),
            "metrics": {"train/reward": 0.5},
            "report": report.model_dump(),
        }
        return answer(lines=[done])

    server.on("POST", f"/api/models/{project}/agent/train", train)
    reply = {"step": 4, "metrics": {"val/reward": 1.0}}
    server.on("POST", f"/api/models/{project}/agent/log", answer(body=reply))


async def register(server: Any, **options: Any) -> tuple[art.Backend, art.TrainableModel]:
    backend = art.Backend(server.url, reconnect_seconds=5, **options)
    model = art.TrainableModel(name="agent", project="demo", base_model="art/tiny")
    await model.register(backend)
    return backend, model


async def test_on_step_gets_each_train_and_log_call(
    server: Any, answer: Any, groups: list[art.TrajectoryGroup]
) -> None:
    train_answers(server, answer)
    got: list[StepRecord] = []

    async def on_step(record: StepRecord) -> None:
        await asyncio.sleep(0)
        got.append(record)

    backend, model = await register(server, on_step=on_step)
    await model.train(iter(groups))
    await model.log(iter(groups[0].trajectories), split="val")
    trained, logged = got
    assert (trained.project, trained.name, trained.step, trained.split) == (
        "demo",
        "agent",
        4,
        "train",
    )
    assert trained.metrics == {"train/reward": 0.5} and trained.groups == groups
    assert trained.config["base_model"] == "art/tiny" and trained.config["learning_rate"] == 1e-5
    assert trained.config["lora"]["rank"] == 8
    assert trained.report is not None and trained.report.num_trained_tokens == 7
    assert [row.reward for row in trained.rollouts()] == [0.0, 1.0]
    assert (logged.step, logged.split, logged.metrics) == (4, "val", {"val/reward": 1.0})
    assert [len(group) for group in logged.groups] == [2] and logged.report is None
    await backend.close()


async def test_an_on_step_that_raises_costs_one_warning(
    server: Any, answer: Any, groups: list[art.TrajectoryGroup], caplog: pytest.LogCaptureFixture
) -> None:
    train_answers(server, answer, (1, 2))
    backend, model = await register(server, on_step=lambda record: 1 / 0)
    assert [(await model.train(groups)).step for _ in range(2)] == [1, 2]
    (told,) = warnings_of(caplog)
    assert "on_step" in told and "division by zero" in caplog.text
    await backend.close()


async def test_a_backend_reports_to_its_trackers(
    server: Any,
    answer: Any,
    groups: list[art.TrajectoryGroup],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    train_answers(server, answer)
    got: list[StepRecord] = []
    fake_tracker(monkeypatch, got.append)
    backend, model = await register(server, trackers=["tensorboard"])
    await model.train(groups)
    await backend.close()
    assert [(record.step, record.split) for record in got] == [(4, "train")]


def test_a_backend_without_trackers_imports_nothing() -> None:
    code = (
        "import sys, art; art.Backend()\n"
        "libraries = {'wandb', 'trackio', 'tensorboard', 'mlflow', 'opentelemetry', 'prometheus_client'}\n"
        "assert not libraries & sys.modules.keys(), libraries & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_long_conversation_keeps_its_ends() -> None:
    messages = [{"role": "user", "content": "a" * 30_000}, {"role": "assistant", "content": "end"}]
    text = tracking.conversation_text(messages)
    assert len(text) <= tracking.MAX_TEXT
    assert text.startswith("user: aaa") and text.endswith("assistant: end") and "[...]" in text


def test_parts_and_tool_calls_are_text() -> None:
    parts = [{"type": "text", "text": "see "}, {"type": "image_url", "image_url": {}}]
    calls = [{"function": {"name": "look"}}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ]
    assert tracking.conversation_text(messages) == f"user: see [image_url]\n\nassistant: {json.dumps(calls)}"


# --- docs/tracking.md ---


def trackio_has_the_step(folder: Path, server: Any, printed: str) -> bool:
    storage: Any = importlib.import_module("trackio.sqlite_storage")
    rows = storage.SQLiteStorage.get_logs("documented", "agent")
    return [(row["step"], row["train/reward"]) for row in rows] == [(4, 0.5)]


CHECKS: dict[str, Callable[[Path, Any, str], bool]] = {
    'trackers=["wandb"]': lambda logs, *_: any(logs.glob("wandb/offline-run-*-agent/*.wandb")),
    'trackers=["trackio"]': trackio_has_the_step,
    'trackers=["tensorboard"]': lambda logs, *_: any(logs.glob("tensorboard/documented/agent/*")),
    'trackers=["mlflow"]': lambda logs, *_: (logs / "mlflow.db").exists(),
    "on_step=on_step": lambda _, __, printed: "agent train {'train/reward': 0.5} 1e-05" in printed,
    'trackers=["otlp"]': lambda _, server, __: any(
        b"train documented/agent" in request.body for request in server.sent("POST", "/v1/traces")
    ),
}
PAGE = Path(__file__).parents[3] / "docs" / "tracking.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("use", CHECKS)
async def test_the_pages_snippet_reports(
    use: str,
    server: Any,
    answer: Any,
    groups: list[art.TrajectoryGroup],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (snippet,) = (text for text in SNIPPETS if use in text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tracing, "_program", None)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
    server.on("POST", "/v1/traces", answer())
    info = {**MODEL_INFO, "project": "documented"}
    server.on("POST", "/api/models", answer(body=info))
    train_answers(server, answer, project="documented")
    names: dict[str, Any] = {"art": art, "StepRecord": StepRecord}
    exec(snippet.replace("http://gpu-box:7623", server.url), names)
    backend: art.Backend = names["backend"]
    model = art.TrainableModel(name="agent", project="documented", base_model="art/tiny")
    await model.register(backend)
    await model.train(groups)
    for tracker in backend._reporting._trackers:
        await asyncio.to_thread(tracker.close, SECONDS)
    await backend.close()
    logs = tmp_path / ".art" / "logs"
    assert CHECKS[use](logs, server, capsys.readouterr().out)


def test_every_snippet_of_the_page_is_run() -> None:
    assert len(SNIPPETS) == len(CHECKS)


def test_tool_calls_of_the_openai_package_are_text_too() -> None:
    function: Any = {"name": "look", "arguments": "{}"}
    call = ChatCompletionMessageFunctionToolCall(id="c", type="function", function=function)
    text = tracking.conversation_text([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert "look" in text


def test_the_flag_names_trackers_and_refuses_others() -> None:
    assert parse(["--tracker", "wandb", "--tracker", "otlp"]).trackers == ("wandb", "otlp")
    assert parse([]).trackers == ()
    with pytest.raises(UsageError, match="--tracker"):
        parse(["--tracker", "neptune"])
