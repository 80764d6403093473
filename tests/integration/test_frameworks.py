"""The examples of examples/frameworks, each as a separate program with the real server."""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.collector import Collector, attributes
from tests.integration.live import Server

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "frameworks"
EXAMPLES = ["openai", "anthropic", "langgraph", "llama_index", "openai_agents", "google_adk"]
EXAMPLES += ["pydantic_ai"]


@pytest.fixture(scope="session")
def python() -> Path:
    """The Python interpreter of .venv-frameworks."""
    subprocess.run([ROOT / "scripts" / "setup-frameworks"], check=True)
    return ROOT / ".venv-frameworks" / "bin" / "python"


def run(server: Server, *command: str | Path, **more: str) -> list[dict[str, Any]]:
    """The lines of JSON that a program prints, one for each step."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ["HOME"],
        "ART_SERVER_URL": server.url,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise it downloads prices
        **more,
    }
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_trains_two_steps_on_exact_tokens(
    server: Server, python: Path, example: str
) -> None:
    steps = run(server, python, FOLDER / f"with_{example}.py")
    assert [step["step"] for step in steps] == [1, 2]
    for report in (step["report"] for step in steps):
        assert report["turns"].keys() <= {"ids", "ledger"}, report
        # a tool call and an answer, of nearly every rollout
        assert sum(report["turns"].values()) >= 1.5 * report["num_trajectories"], report
        assert report["num_trained_tokens"] > 0, report
        reasons = {dropped["reason"] for dropped in report["dropped"]}
        equal = "all rewards in the group are equal: no signal"
        assert reasons <= {equal, "the rollout failed"}, report


def test_arts_names_for_langgraph_train_too(server: Server, python: Path) -> None:
    program = Path(__file__).with_name("langgraph_program.py")
    (report,) = run(server, python, program, PYTHONPATH=str(FOLDER))
    assert report["turns"].keys() <= {"ids", "ledger"} and report["num_trained_tokens"] > 0
    assert sum(report["turns"].values()) >= 1.5 * report["num_trajectories"], report


TRACED = """
import asyncio, functools, task, with_langgraph
task.art.Backend = functools.partial(task.art.Backend, trackers=["otlp"])
asyncio.run(task.train("traced", with_langgraph.run_agent))
"""


def test_one_trace_joins_a_langgraph_rollout_with_the_step_that_it_trained(
    server: Server, python: Path, collector: Collector
) -> None:
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "PYTHONPATH": str(FOLDER)}
    first, second = run(server, python, "-c", TRACED, **endpoint)
    deadline = time.monotonic() + 20  # the server sends its spans every five seconds
    while len(jobs := spans(collector, "job")) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    for step, result in enumerate((first, second), 1):
        (job,) = [each for each in jobs if attributes(each)["art.step"] == step]
        assert attributes(job)["art.adapter"] == f"frameworks/traced@{step}"
        names = {each.span_id: each.name for each in spans(collector, trace=job.trace_id)}
        rollouts = spans(collector, "rollout", job.trace_id)
        assert len(rollouts) >= result["report"]["num_trajectories"]
        chats = spans(collector, "chat frameworks/traced", job.trace_id)
        of_rollouts = [each for each in chats if names[each.parent_span_id] == "rollout"]
        assert chats == of_rollouts and len(chats) >= 1.5 * len(rollouts), "tool calls and answers"
        assert {attributes(each)["art.adapter"] for each in chats} == {
            f"frameworks/traced@{step - 1}"
        }
        (train,) = spans(collector, "train frameworks/traced", job.trace_id)
        assert job.parent_span_id == train.span_id
        phases = {each for each, parent in parents(collector, job) if parent == "job"}
        assert phases == {"queued", "pause", "train", "save", "load", "finish"}


def spans(collector: Collector, name: str | None = None, trace: bytes | None = None) -> list[Any]:
    """The spans of the model, or of one trace."""
    found = [each for _, each in collector.spans if trace in (None, each.trace_id)]
    found = [each for each in found if name in (None, each.name)]
    if trace is not None:
        return found
    return [each for each in found if "frameworks/traced" in str(attributes(each))]


def parents(collector: Collector, job: Any) -> list[tuple[str, str | None]]:
    all_spans = spans(collector, trace=job.trace_id)
    names = {each.span_id: each.name for each in all_spans}
    return [(each.name, names.get(each.parent_span_id)) for each in all_spans]
