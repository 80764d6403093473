"""`GET /metrics`: the server's numbers and then vLLM's own, in Prometheus' text format.

A key that covers some projects gets the steps of their models, and not vLLM's part, which names all adapters.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, get_args

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from art_protocol.learning import LearningInfo, ScoreState
from art_protocol.wire import Health
from art_server.api.parameters import TheCaller, TheServer
from art_server.engine.engine import Engine, EngineState
from art_server.jobs.job_row import ENDED, PENDING
from art_server.jobs.reports import Totals
from art_server.server import Server
from art_server.shared import clock
from art_server.store.registry import RegisteredModel
from art_watch import scores

Pending = Mapping[str, tuple[int, float]]
"""For each state of jobs that have not ended: their number, and when the oldest was accepted (`JobQueue.pending`)."""

router = APIRouter()


class MetricsSnapshot(NamedTuple):
    """Numbers of this moment, and since the server's start."""

    num_waiting: int
    """Requests at the pause gate."""
    num_running: int
    """Requests that the engine has."""
    num_engine_starts: int
    num_faults: Mapping[str, int]
    """Errors of background work, by its name."""
    totals: Totals


def metrics_snapshot(server: Server) -> MetricsSnapshot:
    return MetricsSnapshot(
        server.gate.num_waiting,
        server.gate.num_inside,
        server.fleet.num_starts,
        server.background.num_faults,
        server.reports.totals,
    )


@router.get("/metrics", response_class=Response)
async def metrics(server: TheServer, caller: TheCaller) -> Response:
    """Numbers for Prometheus."""
    pending = await asyncio.to_thread(server.queue.pending)
    models = server.registry.all(caller.projects)
    learners = await server.collector.learners(caller.projects)
    folders = [model.folder for model in models if model.id in learners]
    means = {folder.model_id: await asyncio.to_thread(scores.means, folder) for folder in folders}
    own = exposition(metrics_snapshot(server), server.status.health(), pending, models, learners, means)
    of_engine = await engine_metrics(server.fleet.replicas) if caller.projects is None else b""
    return Response(own + of_engine, media_type=CONTENT_TYPE_PLAIN_0_0_4)


async def engine_metrics(replicas: Sequence[Engine]) -> bytes:
    """vLLM's part, as vLLM writes it. The numbers of several engines have the label `replica`."""
    texts = await asyncio.gather(*(replica.metrics() for replica in replicas))
    if len(texts) == 1:
        return texts[0]
    # In Prometheus' format all samples of a name are one family.
    merged: dict[str, Metric] = {}
    for replica, text in zip(replicas, texts, strict=True):
        for own in text_string_to_metric_families(text.decode()):
            family = merged.setdefault(own.name, Metric(own.name, own.documentation, own.type))
            for sample in own.samples:
                family.samples.append(sample._replace(labels={**sample.labels, "replica": replica.name}))
    return families_text(list(merged.values()))


def exposition(
    figures: MetricsSnapshot,
    health: Health,
    pending: Pending,
    models: Iterable[RegisteredModel],
    learners: Mapping[str, LearningInfo],
    means: Mapping[str, Mapping[str, float]],
) -> bytes:
    """The server's part."""
    own = [*request_families(figures, health), *job_families(figures, pending), *model_families(models)]
    return families_text([*own, *score_families(learners, means)])


def families_text(families: Sequence[Metric]) -> bytes:
    # `auto_describe` would collect once more, to refuse names that another collector of the registry has.
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Families(families))
    return generate_latest(registry)


class Families(Collector):
    """What `prometheus_client` collects from."""

    def __init__(self, families: Sequence[Metric]):
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def request_families(figures: MetricsSnapshot, health: Health) -> Iterator[Metric]:
    """Requests, the engine, and the server's own health."""
    yield gauge("art_requests_waiting", "Requests that wait at the pause gate.", figures.num_waiting)
    yield gauge("art_requests_running", "Requests that the engine has.", figures.num_running)
    states = {state: float(state == health.engine) for state in get_args(EngineState)}
    yield gauges("art_engine_state", "1 for the engine's state.", "state", states)
    yield counter("art_engine_starts", "Starts of vLLM's process.", figures.num_engine_starts)
    if replicas := health.replicas:
        ready = {replica.name: float(replica.engine == "ready") for replica in replicas}
        yield gauges("art_replica_ready", "1 for each of several engines that is ready.", "replica", ready)
        running = {replica.name: float(replica.num_requests) for replica in replicas}
        yield gauges("art_replica_requests", "Requests that each of several engines has.", "replica", running)
    stall = health.longest_stall_seconds
    yield gauge("art_event_loop_longest_stall_seconds", "Longest time the event loop was blocked.", stall)
    failing = dict.fromkeys(health.faults, 1.0)
    yield gauges("art_part_failing", "1 for a part that fails at present.", "part", failing)
    faults = CounterMetricFamily("art_faults", "Errors of background work.", labels=["part"])
    for part, number in figures.num_faults.items():
        faults.add_metric([part], number)
    yield faults


def job_families(figures: MetricsSnapshot, pending: Pending) -> Iterator[Metric]:
    """The queue, ended jobs, and the last step."""
    for_state = {state: float(pending.get(state, (0, 0))[0]) for state in PENDING}
    yield gauges("art_queue_jobs", "Jobs that have not ended.", "state", for_state)
    age = max((clock.now() - oldest for _, oldest in pending.values()), default=0.0)
    yield gauge("art_queue_oldest_seconds", "Age of the oldest job that has not ended.", age)
    totals = figures.totals
    # prometheus_client adds "_total" to the names of counters.
    ended = CounterMetricFamily("art_jobs", "Ended jobs.", labels=["outcome"])
    for outcome in ENDED:
        ended.add_metric([outcome], totals.jobs[outcome])
    yield ended
    yield counter("art_trained_tokens", "Tokens that steps were trained on.", totals.trained_tokens)
    yield gauges("art_step_seconds", "Seconds of the last step.", "phase", totals.seconds)


def model_families(models: Iterable[RegisteredModel]) -> Iterator[Metric]:
    """The step of each model."""
    steps = GaugeMetricFamily("art_model_step", "The step that serves.", labels=["project", "model"])
    for model in models:
        steps.add_metric([model.record.project, model.record.name], model.step)
    yield steps


def score_families(learners: Mapping[str, LearningInfo], means: Mapping[str, Mapping[str, float]]) -> Iterator[Metric]:
    """The scores and releases of the models that learn from scores. Names of scores are those of the policy: 32 at most."""
    of_model = ["project", "model"]
    states = GaugeMetricFamily("art_scores_by_state", "Scores by state.", labels=[*of_model, "state"])
    total = CounterMetricFamily("art_scores", "Scores that were taken.", labels=of_model)
    mean = GaugeMetricFamily("art_score_mean", "Mean of the scores of 24 hours.", labels=[*of_model, "name"])
    paused = GaugeMetricFamily("art_learning_paused", "1 if learning is paused.", labels=of_model)
    candidate = GaugeMetricFamily("art_model_candidate_step", "The step of a canary.", labels=of_model)
    z = GaugeMetricFamily("art_canary_z", "The canary's difference in standard errors.", labels=of_model)
    for model, info in learners.items():
        labels = model.split("/")
        for state in get_args(ScoreState):
            states.add_metric([*labels, state], info.counts.get(state, 0))
        total.add_metric(labels, sum(info.counts.get(state, 0) for state in get_args(ScoreState)))
        for name in means[model].keys() & info.policy.names.keys():
            mean.add_metric([*labels, name], means[model][name])
        paused.add_metric(labels, float(info.state == "paused"))
        release = info.release
        if release is not None and release.state == "canary" and release.candidate is not None:
            candidate.add_metric(labels, release.candidate)
            if release.z is not None:
                z.add_metric(labels, release.z)
    yield from (states, total, mean, paused, candidate, z)


def gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
