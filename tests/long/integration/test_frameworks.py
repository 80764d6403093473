"""The examples of examples/frameworks, each as a separate program with the real server."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from art_server.jobs.reasons import TWICE
from tests.fakes.collector import Collector, attributes
from tests.live import BEFORE_AND_AFTER, Server, done_jobs, run_program
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "frameworks"
EXAMPLES = ["openai", "anthropic", "langgraph", "llama_index", "openai_agents", "google_adk"]
EXAMPLES += ["pydantic_ai", "smolagents"]
EQUAL = "all rewards in the group are equal: no signal"
SHORT = ["--steps", "2", "--groups", "8", "--held-out", "4"]


@pytest.fixture(scope="session")
def python() -> Path:
    """The Python interpreter of .venv-frameworks."""
    subprocess.run([ROOT / "scripts" / "setup-frameworks"], check=True)
    return ROOT / ".venv-frameworks" / "bin" / "python"


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_trains_two_steps_on_exact_tokens(server: Server, python: Path, tmp_path: Path, example: str) -> None:
    printed = run_program(server, tmp_path, python, FOLDER / f"with_{example}.py", *SHORT)
    ((_, after, _, before, _),) = BEFORE_AND_AFTER.findall(printed)
    assert (after, before) == ("2", "0")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    jobs = done_jobs(server, example.replace("_", "-"))
    assert [job["step"] for job in jobs] == [1, 2]
    # a tool call and an answer, of nearly every rollout; the agent of smolagents ends with the call
    turns = 1 if example == "smolagents" else 1.5
    for report in (job["report"] for job in jobs):
        assert report["turns"].keys() <= {"ids", "ledger"}, report
        assert sum(report["turns"].values()) >= turns * report["num_trajectories"], report
        reasons = {dropped["reason"] for dropped in report["dropped"]}
        assert report["num_trained_tokens"] > 0 or reasons == {EQUAL}, report
        # A framework that rewrites an answer, as ADK does with half a call, makes a second history with the same opening.
        assert reasons <= {EQUAL, "the rollout failed", TWICE}, report


def test_arts_names_for_langgraph_train_too(server: Server, python: Path, tmp_path: Path) -> None:
    program = Path(__file__).with_name("langgraph_program.py")
    report = json.loads(run_program(server, tmp_path, python, program, PYTHONPATH=str(FOLDER)))
    assert report["turns"].keys() <= {"ids", "ledger"} and report["num_trained_tokens"] > 0
    assert sum(report["turns"].values()) >= 1.5 * report["num_trajectories"], report


TRACED = """
import asyncio, functools, task, with_langgraph
task.art.Backend = functools.partial(task.art.Backend, trackers=["otlp"])
asyncio.run(task.train("traced", with_langgraph.run_agent))
"""


def test_one_trace_joins_a_langgraph_rollout_with_the_step_that_it_trained(
    server: Server, python: Path, tmp_path: Path, collector: Collector
) -> None:
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "PYTHONPATH": str(FOLDER)}
    run_program(server, tmp_path, python, "-c", TRACED, *SHORT, **endpoint)
    wait_until(lambda: len(spans(collector, "job")) >= 2)  # the server sends its spans every five seconds
    jobs = spans(collector, "job")
    for step, done in enumerate(done_jobs(server, "traced"), 1):
        (job,) = [span for span in jobs if attributes(span)["art.step"] == step]
        assert attributes(job)["art.adapter"] == f"traced/art-tiny@{step}"
        names = {span.span_id: span.name for span in spans(collector, trace=job.trace_id)}
        rollouts = spans(collector, "rollout", job.trace_id)
        assert len(rollouts) >= done["report"]["num_trajectories"]
        chats = spans(collector, "chat traced/art-tiny", job.trace_id)
        of_rollouts = [span for span in chats if names[span.parent_span_id] == "rollout"]
        assert chats == of_rollouts and len(chats) >= 1.5 * len(rollouts), "tool calls and answers"
        assert {attributes(span)["art.adapter"] for span in chats} == {f"traced/art-tiny@{step - 1}"}
        (train,) = spans(collector, "train traced/art-tiny", job.trace_id)
        assert job.parent_span_id == train.span_id
        phases = {phase for phase, parent in parents(collector, job) if parent == "job"}
        # The first job on a base checks its layers.
        assert phases - {"check"} == {"queued", "pause", "train", "save", "load", "finish"}


def spans(collector: Collector, name: str | None = None, trace: bytes | None = None) -> list[Any]:
    """The spans of the model, or of one trace."""
    matches = [span for _, span in collector.spans if trace in (None, span.trace_id)]
    matches = [span for span in matches if name in (None, span.name)]
    if trace is not None:
        return matches
    return [span for span in matches if "traced/art-tiny" in str(attributes(span))]


def parents(collector: Collector, job: Any) -> list[tuple[str, str | None]]:
    all_spans = spans(collector, trace=job.trace_id)
    names = {span.span_id: span.name for span in all_spans}
    return [(span.name, names.get(span.parent_span_id)) for span in all_spans]
