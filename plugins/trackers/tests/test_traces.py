"""Traces: over a real server and client into a collector, one trace joins a rollout with what was trained on it."""

import asyncio
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

import art
from art import tracing
from art_protocol.tracking import link_of
from art_protocol.wire import ErrorDetail
from art_server.jobs.reports import JobSpans
from art_server.jobs.trainer_process import TrainerError
from art_trackers.tracing import CONTENTS_VARIABLE, Tracing
from tests.fakes.collector import Collector, attributes
from tests.quick.jobs.queued_jobs import add, open_queue
from tests.quick.server.served import Served, serving

pytestmark = pytest.mark.anyio

KEY = "a-secret-key"
SECRETS = (b"a private", KEY.encode())


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    fake = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", fake.url)
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    monkeypatch.setattr(tracing, "_program", None)
    yield fake
    fake.close()


async def roll_out(model: art.TrainableModel, reward: float) -> art.Trajectory:
    async with art.rollout(model) as rollout:
        messages: Any = [{"role": "user", "content": "a private question"}]
        name = model.get_inference_name()
        await model.openai_client().chat.completions.create(model=name, messages=messages)
        return await rollout.trajectory(reward=reward)


async def run_a_step(served: Served) -> int:
    backend = art.Backend(served.url, KEY, trackers=["otlp"])
    model = art.TrainableModel(name="agent", project="demo", base_model="base")
    await model.register(backend)
    group = art.TrajectoryGroup([await roll_out(model, 0.0), await roll_out(model, 1.0)])
    try:
        step = (await model.train([group])).step
        await roll_out(model, 0.0)
    finally:
        await backend.close()
    return step


async def test_one_trace_joins_rollouts_completions_job_and_phases(collector: Collector, tmp_path: Path) -> None:
    async with serving(tmp_path, trackers=("otlp",)) as served:
        assert await run_a_step(served) == 1
    names = {span.span_id: span.name for _, span in collector.spans}
    parents = {
        span.name: names.get(span.parent_span_id)
        for _, span in collector.spans
        if span.trace_id == collector.named("job")[0].trace_id
    }
    phases = ("queued", "check", "pause", "train", "save", "load", "finish")
    assert parents == {
        "step demo/agent": None,
        "rollout": "step demo/agent",
        "chat demo/agent": "rollout",
        "train demo/agent": "step demo/agent",
        "job": "train demo/agent",
        **dict.fromkeys(phases, "job"),
    }
    (job,) = collector.named("job")
    assert attributes(job)["art.adapter"] == "demo/agent@1" and attributes(job)["art.step"] == 1
    (load,) = collector.named("load")
    assert attributes(load)["art.adapter"] == "demo/agent@1"
    rollouts, completions = collector.named("rollout"), collector.named("chat demo/agent")
    assert [attributes(span)["art.reward"] for span in rollouts] == [0.0, 1.0, 0.0]
    before, _, after = map(attributes, completions)
    assert before["gen_ai.usage.input_tokens"] == 3 and before["gen_ai.usage.output_tokens"] == 2
    assert (before["art.adapter"], after["art.adapter"]) == ("demo/agent@0", "demo/agent@1")
    assert {span.trace_id for span in rollouts[:2]} == {job.trace_id}
    assert rollouts[2].trace_id != job.trace_id, "the next step is another trace"
    assert {service for service, _ in collector.spans} == {"art", "art-server"}


async def test_a_job_that_fails_ends_its_spans_with_the_errors_code(collector: Collector, tmp_path: Path) -> None:
    async with serving(tmp_path, trackers=("otlp",)) as served:
        served.trainer.events = [TrainerError("gap_too_large", "a private message")]
        with pytest.raises(art.ArtJobError):
            await run_a_step(served)
    (job,), (train,) = collector.named("job"), collector.named("train")
    assert job.status.message == train.status.message == "gap_too_large"
    assert job.status.code == train.status.code == Status.STATUS_CODE_ERROR
    assert train.parent_span_id == job.span_id and "art.step" not in attributes(job)


async def test_a_job_that_is_cancelled_or_of_an_earlier_server_has_one_span(
    collector: Collector, tmp_path: Path
) -> None:
    queue, tracer = open_queue(tmp_path), Tracing("jobs")
    cancelled = add(queue, f"{'a' * 32}-{'b' * 16}").job_id
    spans = JobSpans(tracer)
    spans.take(queue.get(cancelled))
    queue.set_cancelled(cancelled, is_running=False)
    spans.take(queue.get(cancelled))
    earlier = add(queue).job_id

    def enter(phase: str) -> None:
        queue.set_running(earlier, 1)
        queue.set_progress(earlier, phase)
        spans.take(queue.get(earlier))

    enter("train 1 of 2")
    enter("train 2 of 2")
    queue.set_waiting(earlier, ErrorDetail(message="killed", code="trainer_died"), {}, 0.0)
    spans.take(queue.get(earlier))
    enter("train 1 of 2")
    queue.set_failed(earlier, ErrorDetail(message="bad", code="bad"))
    spans.take(queue.get(earlier))
    queue.database.close()
    await asyncio.to_thread(tracer.close)
    jobs = {attributes(job)["art.job"]: job for job in collector.named("job")}
    assert jobs[cancelled].trace_id.hex() == "a" * 32
    assert jobs[cancelled].status.message == "cancelled"
    assert [span.status.message for span in collector.named("train")] == ["trainer_died", "bad"]
    assert jobs[earlier].parent_span_id == b""


async def test_spans_hold_neither_contents_nor_keys(collector: Collector, tmp_path: Path) -> None:
    async with serving(tmp_path, trackers=("otlp",)) as served:
        await run_a_step(served)
    assert collector.spans
    assert not [body for body in collector.bodies if any(secret in body for secret in SECRETS)]


async def test_contents_are_in_the_spans_that_were_asked_for_them(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONTENTS_VARIABLE, "true")
    async with serving(tmp_path, trackers=("otlp",)) as served:
        await run_a_step(served)
    about = attributes(collector.named("chat demo/agent")[0])
    assert "a private question" in about["gen_ai.input.messages"]
    assert "a private answer" in about["gen_ai.output.messages"]
    assert KEY.encode() not in b"".join(collector.bodies)


async def test_a_span_of_the_program_is_the_parent(collector: Collector, tmp_path: Path) -> None:
    mine = Tracing("mine")
    async with serving(tmp_path, trackers=("otlp",)) as served:
        with mine.start("my loop") as span:
            await run_a_step(served)
    await asyncio.to_thread(mine.close)
    trace = bytes.fromhex(f"{span.span.get_span_context().trace_id:032x}")
    assert {exported.trace_id for _, exported in collector.spans} == {trace}
    assert not collector.named("step demo/agent")


async def test_a_server_without_the_tracker_makes_no_spans(collector: Collector, tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        assert served.server.reports.tracing is None
        await run_a_step(served)
    assert {service for service, _ in collector.spans} == {"art"}


async def test_a_collector_that_refuses_costs_one_warning(
    collector: Collector, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 403
    spans = Tracing("refused")
    for _ in range(3):
        spans.start("a").end()
        await asyncio.to_thread(spans.close)
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1 and "403" in told[0]


async def test_a_rollout_with_a_name_of_its_own_is_linked_by_the_header(collector: Collector, tmp_path: Path) -> None:
    async with serving(tmp_path, trackers=("otlp",)) as served:
        backend = art.Backend(served.url, trackers=["otlp"])
        model = art.TrainableModel(name="agent", project="demo", base_model="base")
        await model.register(backend)
        async with art.rollout(model, session="game-1") as rollout:
            messages: Any = [{"role": "user", "content": "hi"}]
            client = rollout.openai_client()
            await client.chat.completions.create(model="agent", messages=messages)
        await backend.close()
    (chat,), (rolled,) = collector.named("chat agent"), collector.named("rollout")
    assert chat.parent_span_id == rolled.span_id and chat.trace_id == rolled.trace_id


async def test_a_rollout_that_fails_ends_its_span_with_the_errors_type(collector: Collector, tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        backend = art.Backend(served.url, trackers=["otlp"])
        model = art.TrainableModel(name="agent", project="demo", base_model="base")
        await model.register(backend)
        failure = ValueError("a private message")
        with pytest.raises(ValueError) as caught:
            async with art.rollout(model):
                raise failure
        assert caught.value is failure
        await backend.close()
    (rolled,) = collector.named("rollout")
    assert rolled.status.message == "ValueError"
    assert not [body for body in collector.bodies if b"a private" in body]


def test_a_span_that_cannot_be_made_costs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    spans = Tracing("broken")
    spans._tracer = None
    for _ in range(2):
        with spans.start("a") as span:
            span.set({"art.step": 1})
            assert span.link is None
    (told,) = (record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    assert "makes no span" in told


def test_settings_that_opentelemetry_refuses_cost_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many")
    assert Tracing.start_service("broken") is None
    (told,) = (record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    assert "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT" in told


async def test_a_traceparent_is_the_parent_and_the_session_a_link(collector: Collector) -> None:
    spans = Tracing("a")
    parent, session = f"{'a' * 32}-{'b' * 16}", f"{'c' * 32}-{'d' * 16}"
    spans.start("child", link_of(f"00-{parent}-01"), links=[session]).end()
    await asyncio.to_thread(spans.close)
    (child,) = collector.named("child")
    assert (child.trace_id.hex(), child.parent_span_id.hex()) == tuple(parent.split("-"))
    assert child.links[0].trace_id.hex() == "c" * 32


@pytest.mark.parametrize("text", [None, "", "game-1", "a" * 32, f"00-{'a' * 32}-{'b' * 16}", f"{'A' * 32}-{'b' * 16}"])
def test_other_names_are_no_links(text: str | None) -> None:
    assert link_of(text) is None


def test_a_program_s_seed_has_no_effect_on_links() -> None:
    """They become idempotency keys and names of sessions."""
    spans = Tracing("seeded")
    links: list[str | None] = []
    drawn: list[float] = []
    for _ in range(2):
        random.seed(0)
        links.append(spans.start("step").link)
        drawn.append(random.random())
    assert links[0] != links[1] and drawn[0] == drawn[1] == random.Random(0).random()
