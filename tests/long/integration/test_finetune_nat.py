"""`art finetune` on files of NVIDIA's NeMo Agent Toolkit: the examples unchanged, and the guide of its plugin."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.live import Server

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "examples" / "nemo_agent_toolkit" / "configs"
GUIDE = """
llms:
  training_llm:
    _type: openai
    model_name: art/tiny
    base_url: http://localhost:8000/v1 # ART inference endpoint
    api_key: default
    temperature: 0.4

workflow:
  _type: art_tic_tac_toe
  llm: training_llm

eval:
  general:
    max_concurrency: 16
    output_dir: .tmp/nat/finetuning/eval
    dataset:
      _type: json
      file_path: data/training_data.json
  evaluators:
    my_reward:
      _type: art_position_value

trajectory_builders:
  art_builder:
    _type: openpipe_art_traj_builder
    num_generations: 2

trainer_adapters:
  art_adapter:
    _type: openpipe_art_trainer_adapter
    backend:
      ip: "localhost"
      port: 7623
      name: "my_training_run"
      project: "my_project"
      base_model: "art/tiny"
      api_key: "default"
      init_args:
        max_seq_length: 4096 # Reduce sequence length
      engine_args:
        gpu_memory_utilization: 0.7 # Leave more headroom
        tensor_parallel_size: 1
    training:
      learning_rate: 1e-6
      beta: 0.0

trainers:
  art_trainer:
    _type: openpipe_art_trainer

finetuning:
  enabled: true
  trainer: art_trainer
  trajectory_builder: art_builder
  trainer_adapter: art_adapter
  reward_function:
    name: my_reward
  num_epochs: 20
  output_dir: .tmp/nat/finetuning/output
  curriculum_learning:
    enabled: true
    initial_percentile: 0.3      # Start with easiest 30%
    increment_percentile: 0.2    # Add 20% each expansion
    expansion_interval: 5        # Expand every 5 epochs
    min_reward_diff: 0.1         # Filter no-variance groups
    sort_ascending: false        # Easy-to-hard
  target_functions:
    - <workflow>
    - tool_calling_function
  target_model: training_llm     # Only include steps from this model
"""
"""The guide's file with its advanced sections. Base model and the types of workflow and evaluator are others, and the workflow is
one of the target functions."""


@pytest.fixture(scope="session")
def art() -> Path:
    """The command of .venv-nat."""
    subprocess.run([ROOT / "scripts" / "setup-nat"], check=True)
    return ROOT / ".venv-nat" / "bin" / "art"


def finetune(art: Path, server: Server, folder: Path, *arguments: str, cwd: Path = ROOT) -> list[dict[str, Any]]:
    """Runs the command, and returns the rows of training_metrics.jsonl."""
    variables = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    port = server.url.rpartition(":")[2]
    where = ["-o", "trainer_adapters.art_adapter.backend.port", port, "-o", "finetuning.output_dir", str(folder)]
    done = subprocess.run([art, "finetune", *arguments, *where], env=variables, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in (folder / "training_metrics.jsonl").read_text().splitlines()]


def reports(server: Server, project: str, name: str) -> list[dict[str, Any]]:
    history = server.path / "art" / project / "models" / name / "history.jsonl"
    rows = [json.loads(line) for line in history.read_text().splitlines()]
    with server.client() as client:
        return [client.get(f"/api/jobs/{row['job_id']}").json()["report"] for row in rows if "job_id" in row]


FAILING_EVALUATOR = """
import asyncio
from types import SimpleNamespace
from art.finetune import toolkit
from art.finetune.rows import DatasetRow
from nat.plugins.eval.data_models.evaluator_io import EvalOutputItem
from nat.plugins.eval.evaluator.base_evaluator import BaseEvaluator

class Fails(BaseEvaluator):
    async def evaluate_item(self, item):
        if item.output_obj != "good":
            raise RuntimeError("the judge is down")
        return EvalOutputItem(id=item.id, score=0.0, reasoning={"error": "wrong answer"})

evaluate = toolkit._evaluator("judge", SimpleNamespace(evaluate_fn=Fails().evaluate))
row = DatasetRow(id="0", question="q", answer="a", columns={})
print(asyncio.run(evaluate(row, "good", None)))
try:
    asyncio.run(evaluate(row, "bad", None))
except ValueError as error:
    print(error)
"""


def test_an_evaluator_that_fails_is_no_reward(art: Path) -> None:
    python = art.with_name("python")
    printed = subprocess.run([python, "-c", FAILING_EVALUATOR], check=True, capture_output=True, text=True).stdout
    assert printed.splitlines() == ["0.0", "evaluator 'judge' failed: the judge is down"]


def test_a_workflow_learns_from_its_file(art: Path, server: Server, tmp_path: Path) -> None:
    rows = finetune(art, server, tmp_path / "out", str(CONFIGS / "tic_tac_toe.yml"))
    rewards = [row["avg_reward"] for row in rows]
    print(rewards)
    assert len(rewards) == 10 and sum(rewards[-2:]) / 2 > rewards[0] + 0.08
    for report in reports(server, "nat", "nat-tic-tac-toe"):
        assert report["turns"].keys() <= {"ids", "ledger"} and report["num_trained_tokens"] > 0


def test_tool_messages_are_the_tools(art: Path, server: Server, tmp_path: Path) -> None:
    rows = finetune(art, server, tmp_path / "out", str(CONFIGS / "tools.yml"), "-o", "finetuning.num_epochs", "2")
    assert [row["curriculum_percentile"] for row in rows] == [0.75, 0.75]
    for report in reports(server, "nat", "nat-tools"):
        assert report["turns"].keys() <= {"ids", "ledger"}
        assert sum(report["turns"].values()) >= 1.5 * report["num_trajectories"], "a call, and the answer to its result"


def test_the_guides_commands_run(art: Path, server: Server, tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "finetune.yml").write_text(GUIDE)
    (tmp_path / "data").mkdir()
    games = json.loads((ROOT / "examples" / "nemo_agent_toolkit" / "data" / "tic_tac_toe.json").read_text())
    for name in ("training_data", "val"):
        (tmp_path / "data" / f"{name}.json").write_text(json.dumps(games[:6]))
    file, short = "--config_file=configs/finetune.yml", ("-o", "finetuning.num_epochs", "2")
    validated = ("--validation_dataset=data/val.json", "--validation_interval=5")
    rows = finetune(art, server, tmp_path / "a", file, *validated, *short, cwd=tmp_path)
    assert [row["curriculum_percentile"] for row in rows] == [0.3, 0.3]
    validations = json.loads((tmp_path / "a" / "validation_history.json").read_text())
    assert [row["epoch"] for row in validations] == [0, 2] and all("avg_reward" in row for row in validations)
    assert len(finetune(art, server, tmp_path / "b", file, *short, cwd=tmp_path)) == 2
