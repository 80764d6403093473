"""NVIDIA's NeMo Agent Toolkit and its plugin for ART, as published, with the real server."""

import json
import os
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.live import Server
from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[3]
EQUAL = "all rewards in the group are equal: no signal"


@pytest.fixture(scope="session")
def environment() -> Path:
    """The folder of programs in .venv-nat."""
    subprocess.run([ROOT / "scripts" / "setup-nat"], check=True)
    return ROOT / ".venv-nat" / "bin"


class _AnyAnswer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Logs nothing: pytest shows the rest."""


@pytest.fixture(scope="module", autouse=True)
def health_port() -> Iterator[None]:
    """A server that answers 404 on port 8000, where the plugin checks for any answer; our server is on a free port."""
    try:
        listener = ThreadingHTTPServer(("127.0.0.1", 8000), _AnyAnswer)
    except OSError:  # whoever has the port answers
        yield
        return
    with listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        yield
        listener.shutdown()


def run(command: list[str | Path], folder: Path = ROOT) -> str:
    variables = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def jobs(server: Server, project: str, name: str) -> list[dict[str, Any]]:
    """The job of each step of a model, from its history."""
    history = server.path / "art" / project / "models" / name / "history.jsonl"
    rows = [json.loads(line) for line in history.read_text().splitlines()]
    with server.client() as client:
        return [client.get(f"/api/jobs/{row['job_id']}").json() for row in rows if "job_id" in row]


def finetune(server: Server, environment: Path, folder: Path, config: str, **overrides: str) -> list[dict[str, Any]]:
    """Runs `nat finetune` for two epochs of two generations; returns the lines of training_metrics.jsonl."""
    file = ROOT / "examples" / "nemo_agent_toolkit" / "configs" / f"{config}.yml"
    command: list[str | Path] = [environment / "nat", "--log-level", "warning"]
    command += ["finetune", f"--config_file={file}"]
    settings = {
        "llms.training_llm.base_url": f"{server.url}/v1",
        "trainer_adapters.art_adapter.backend.port": server.url.rpartition(":")[2],
        "trajectory_builders.art_builder.num_generations": "2",
        "finetuning.num_epochs": "2",
        "finetuning.output_dir": str(folder / "output"),
        "eval.general.output_dir": str(folder / "eval"),
        **overrides,
    }
    for key, value in settings.items():
        command += ["-o", key, value]
    run(command)
    lines = (folder / "output" / "training_metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_adapter_of_the_plugin_trains_twice_and_deletes_checkpoints(server: Server, environment: Path) -> None:
    program = ROOT / "tests" / "long" / "integration" / "nat_adapter.py"
    ends = [json.loads(line) for line in run([environment / "python", program, server.url]).splitlines()]
    assert [end["status"] for end in ends] == ["completed", "completed"], ends
    answers, tools = jobs(server, "tests", "nat-adapter")
    assert [answers["step"], tools["step"]] == [1, 2]
    assert answers["report"]["turns"] == {"ledger": 4}, answers
    assert tools["report"]["turns"].keys() == {"ledger"}, tools
    assert tools["report"]["turns"]["ledger"] > 4, "no episode had a tool's result"
    for job in (answers, tools):
        assert job["report"]["dropped"] == [], job
        assert job["report"]["config"]["learning_rate"] == 2e-4, job
    kept = {path.name for path in (server.model_dir("nat-adapter") / "checkpoints").iterdir()}
    assert "0000" not in kept and {"0001", "0002"} <= kept, kept


def test_finetune_trains_the_game_on_exact_tokens(server: Server, environment: Path, tmp_path: Path) -> None:
    epochs = finetune(server, environment, tmp_path, "tic_tac_toe")
    assert [epoch["num_trajectories"] for epoch in epochs] == [48, 48]
    for name in ("reward_history.json", "reward_plot.png"):
        assert (tmp_path / "output" / name).stat().st_size > 0
    trained = jobs(server, "nat", "nat-tic-tac-toe")
    assert [job["step"] for job in trained] == [1, 2]
    for job in trained:
        assert job["report"]["config"]["learning_rate"] == 4e-3, "not the one of the YAML"
        assert job["report"]["turns"].keys() == {"ledger"}, job
        assert job["report"]["continuations"].keys() == {"joined"}, job
        assert {dropped["reason"] for dropped in job["report"]["dropped"]} <= {EQUAL}, job


def test_finetune_trains_an_agent_with_tools_under_curriculum_learning(
    server: Server, environment: Path, tmp_path: Path
) -> None:
    every_group = {"finetuning.curriculum_learning.min_reward_diff": "0.0"}
    epochs = finetune(server, environment, tmp_path, "tools", **every_group)
    assert len(epochs) == 2
    state = json.loads((tmp_path / "output" / "curriculum_state.json").read_text())
    assert state["current_percentile"] == 1.0
    turns: Counter[str] = Counter()
    for job in jobs(server, "nat", "nat-tools"):
        turns.update(job["report"]["turns"])
        assert {dropped["reason"] for dropped in job["report"]["dropped"]} <= {EQUAL}, job
    assert turns["ledger"] >= 0.99 * turns.total() > 0, turns
