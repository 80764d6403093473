"""`/metrics`: what Prometheus reads, who may read it, and the dashboard that shows it."""

import asyncio
import importlib.util
import json
import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import art
from art_protocol.wire import Health, JobReport, ReplicaHealth, TrainConfig
from art_server.jobs.job_row import Payload
from art_server.jobs.reports import Totals
from art_server.jobs.trainer_process import TrainerError
from art_server.settings import ApiKey
from art_server.shared.trainer_messages import Batch
from art_watch.metrics import MetricsSnapshot, engine_metrics, exposition
from tests.fakes.parts import FakeEngine
from tests.quick.learning.crowd import crowd
from tests.quick.server.served import Served, sample_group, serving

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[3]
DASHBOARD = json.loads((ROOT / "docker" / "grafana.json").read_text())
KEYS = (
    ApiKey(key="all"),
    ApiKey(key="other", projects=frozenset({"other"})),
    ApiKey(key="infer", scopes=frozenset({"infer"})),
)


async def fetch(served: Served, key: str | None = None) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient() as client:
        return await client.get(f"{served.url}/metrics", headers=headers)


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Values by name and labels, which are in the order of their names."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def add_model(served: Served, key: str | None = None) -> art.TrainableModel:
    model = art.TrainableModel(name="agent", project="demo", base_model="base")
    await model.register(art.Backend(served.url, key))
    return model


async def test_the_numbers_follow_what_the_server_does(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        model = await add_model(served)
        before = samples((await fetch(served)).text)
        assert before["art_model_step", "agent", "demo"] == 0
        assert before["art_jobs_total", "done"] == 0 and before["art_queue_oldest_seconds",] == 0
        await model.train([await sample_group(model)])
        served.trainer.events = [TrainerError("bad", "refused")]
        with pytest.raises(art.ArtJobError):
            await model.train([await sample_group(model)])
        response = await fetch(served)
        numbers = samples(response.text)
        await model.backend().close()
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert numbers["art_model_step", "agent", "demo"] == 1
    assert numbers["art_jobs_total", "done"] == 1 and numbers["art_jobs_total", "failed"] == 1
    assert numbers["art_trained_tokens_total",] == 4
    assert numbers["art_step_seconds", "step_backend_train"] > 0
    assert numbers["art_step_seconds", "job_train"] >= 0
    assert numbers["art_engine_state", "ready"] == 1 and numbers["art_engine_state", "starting"] == 0
    assert numbers["art_engine_starts_total",] == 1
    assert numbers["art_requests_waiting",] == 0 and numbers["art_requests_running",] == 0
    assert numbers["vllm:num_requests_running",] == 3.0, "vLLM's own follow"


async def test_a_model_that_learns_has_the_numbers_of_its_scores_and_its_canary(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        await shop.learn(batch=4, user_share=1, names={"thumb": {}}, release="canary", steps_per_release=1)
        for number in range(4):
            await shop.score(await shop.answer(number), number % 2, user=f"u{number}")
        while ((await shop.info())["release"] or {}).get("state") != "canary":  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await shop.score(await shop.answer(9), 1)
        numbers = samples((await fetch(shop.served)).text)
        await shop.http.post("/api/models/shop/helper/learning", json={"action": "pause"})
        assert samples((await fetch(shop.served)).text)["art_learning_paused", "helper", "shop"] == 1
    assert numbers["art_scores_by_state", "helper", "shop", "trained"] == 4
    assert numbers["art_scores_by_state", "helper", "shop", "scored"] == 1
    assert numbers["art_scores_total", "helper", "shop"] == 5
    assert numbers["art_score_mean", "helper", "thumb", "shop"] == pytest.approx(0.6)
    assert (numbers["art_model_step", "helper", "shop"], numbers["art_model_candidate_step", "helper", "shop"]) == (
        0,
        1,
    )
    assert ("art_canary_z", "helper", "shop") not in numbers, "too few users"
    assert numbers["art_learning_paused", "helper", "shop"] == 0


async def test_waiting_requests_and_queued_jobs_are_counted(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        model = await add_model(served)
        gate, queue = served.server.gate, served.server.queue
        served.engine.base = None  # no job can run
        payload = Payload.make(Batch(groups=[]))
        number = served.server.registry.get("demo", "agent").number
        queue.insert(number, None, "digest", TrainConfig(), payload, JobReport())
        with gate.inside("demo/agent@0"):
            numbers = samples((await fetch(served)).text)
        await model.backend().close()
    assert numbers["art_requests_running",] == 1
    assert numbers["art_queue_jobs", "queued"] == 1 and numbers["art_queue_jobs", "running"] == 0
    assert numbers["art_queue_oldest_seconds",] > 0


async def test_an_engine_that_does_not_answer_leaves_the_servers_numbers(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        await served.engine.vllm.stop()
        response = await fetch(served)
        assert response.status_code == 200 and "vllm:" not in response.text
        assert samples(response.text)["art_engine_state", "ready"] == 1


async def test_the_numbers_of_several_engines_have_their_names(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        other = FakeEngine()
        other.name = "engine-1"
        other.http = served.engine.http
        text = (await engine_metrics([served.engine, other])).decode()  # type: ignore[list-item]
    assert text.count("# TYPE vllm:num_requests_running gauge") == 1
    numbers = samples(text)
    assert numbers["vllm:num_requests_running", "engine"] == numbers["vllm:num_requests_running", "engine-1"] == 3.0
    replicas = [ReplicaHealth(name="engine-0", engine="ready", num_requests=3), ReplicaHealth(name="engine-1")]
    figures = MetricsSnapshot(0, 3, 2, {}, Totals())
    own = samples(exposition(figures, Health(engine="ready", replicas=replicas), {}, [], {}, {}).decode())
    assert (own["art_replica_ready", "engine-0"], own["art_replica_ready", "engine-1"]) == (1, 0)
    assert own["art_replica_requests", "engine-0"] == 3


async def test_a_key_sees_the_models_of_its_projects_and_no_key_sees_nothing(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, api_keys=KEYS) as served:
        model = await add_model(served, "all")
        await model.backend().close()
        assert "demo" in (await fetch(served, "all")).text
        of_other = (await fetch(served, "other")).text
        assert "art_jobs_total" in of_other
        assert "demo" not in of_other and "vllm:" not in of_other
        assert (await fetch(served)).status_code == 401
        assert (await fetch(served, "infer")).status_code == 403


FAMILY = re.compile(r"^# TYPE (art_\w+?)(?:_total)? (counter|gauge)$", re.MULTILINE)
"""Also families without a sample, such as those of a canary."""
NAME = re.compile(r"\b(?:art_[a-z_]+|vllm:[a-z_]+)")


def vllm_names() -> set[str]:
    """The metrics in vLLM's source, with the endings that Prometheus gives to counters and histograms."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "v1" / "metrics" / "loggers.py").read_text()
    names = re.findall(r'name="(vllm:[a-z_]+)"', source)
    return {name + end for name in names for end in ("", "_total", "_bucket", "_sum", "_count")}


async def test_the_dashboard_names_only_metrics_that_are_exported(tmp_path: Path) -> None:
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    expressions += [variable["query"] for variable in DASHBOARD["templating"]["list"]]
    named = {name for expression in expressions for name in NAME.findall(expression)}
    async with serving(tmp_path) as served:
        model = await add_model(served)
        await model.train([await sample_group(model)])
        served.server.background.record_fault("test", ValueError("a fault"))
        text = (await fetch(served)).text
        exported = {name for name, *_ in samples(text)}
        exported |= {f"{name}_total" * (kind == "counter") or name for name, kind in FAMILY.findall(text)}
        await model.backend().close()
    own = {name for name in exported if name.startswith("art_")}
    assert named <= own | vllm_names()
    assert own <= named, "the dashboard shows every number of the server"


def test_the_dashboards_panels_do_not_overlap() -> None:
    places = [tuple(panel["gridPos"].values()) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
