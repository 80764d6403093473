"""The ART wire without an engine: bodies as NVIDIA's plugin sends them, answers, keys, and what is told."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from art_protocol.wire import ErrorDetail, JobEvent, TrainConfig
from art_server.api.auth import ART_PATHS
from art_server.api.control import event_lines
from art_server.app import make_app
from art_server.jobs.job_row import JobRow
from art_server.server import Server
from art_server.settings import ApiKey, ServerConfig
from art_server.store import files
from art_server.store.model_folder import ModelFolder
from tests.asgi_client import client
from tests.fakes.parts import FakeEngine
from tests.quick.api.idle_server import DONE, MODEL, choice, follow_with, make, train_body

pytestmark = pytest.mark.anyio

KEYS = (ApiKey(key="all"), ApiKey(key="other", projects=frozenset({"q"})))


def jobs_of(server: Server) -> list[JobRow]:
    return server.queue.jobs(None, ("queued",), 10)


PROGRESS = JobEvent(event="progress", job_id="j", phase="train")


async def train(app: FastAPI, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with client(app) as http:
        response = await http.post("/_train_model", json=body)
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()]


async def test_an_event_is_one_line_also_for_who_splits_at_u2028() -> None:
    """As httpx's `aiter_lines` and `str.splitlines`. A program's metric may have any name."""
    event = DONE.model_copy(update={"metrics": {"train/calls\u2028a\u2029b\u0085\x1c": 1.0}})
    server: Any = SimpleNamespace(runner=SimpleNamespace())
    follow_with(server, event)
    (line,) = [line async for line in event_lines(server.runner, "j")]
    assert len(line.decode().splitlines()) == 1
    assert JobEvent.model_validate_json(line) == event


async def test_a_train_call_streams_one_line_of_numbers(tmp_path: Path) -> None:
    app, server = make(tmp_path)
    follow_with(server, PROGRESS, PROGRESS, DONE)
    (row,) = await train(app, train_body(choice(5), choice(6)))
    counts = {"num_gradient_steps": 1.0, "data/step_num_gradient_steps": 1.0}
    assert row == {"loss/train": 0.5, **counts}
    (job,) = jobs_of(server)
    assert TrainConfig.model_validate_json(job.config).learning_rate == 5e-05
    assert (job.report.turns, job.metrics["train/reward"]) == ({"ids": 2}, 0.5)


async def test_trainer_args_win_and_unknown_keys_are_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app, server = make(tmp_path)
    follow_with(server, DONE)
    trainer_args = {"learning_rate": "1e-6", "beta": 0.1, "output_dir": "/tmp/x", "seed": None}
    model = MODEL | {"_internal_config": {"trainer_args": trainer_args, "peft_args": {"r": 8}}}
    body = train_body(choice(5), model=model, dev_config={"ppo": True, "kimi_k2_tau": 0.1})
    body["trajectory_groups"][0]["trajectories"][0]["exchanges"] = [1]
    for _ in range(2):
        await train(app, body)
    for job in jobs_of(server):
        config = TrainConfig.model_validate_json(job.config)
        assert (config.learning_rate, config.beta, config.clip) == (1e-6, 0.1, "two_sided")
        told = {
            note.removesuffix(" has no effect here")
            for note in job.report.notes
            if note.endswith(" has no effect here")
        }
        assert told == {
            *("_internal_config.peft_args", "dev_config.kimi_k2_tau", "trainer_args.output_dir"),
            "trajectories[].exchanges",
        }
    assert caplog.text.count("trainer_args.output_dir has no effect here") == 1


@pytest.mark.parametrize(
    ("error", "texts"),
    [
        (
            ErrorDetail(message="CUDA out of memory.", code="out_of_memory"),
            ("CUDA out of memory. Lower init_args.max_seq_length", "gpu_memory_utilization"),
        ),
        (ErrorDetail(message="the loss is NaN", code="non_finite"), ("the loss is NaN",)),
    ],
)
async def test_a_failed_job_ends_the_stream_with_cause_and_remedy(
    tmp_path: Path, error: ErrorDetail, texts: tuple[str, ...]
) -> None:
    app, server = make(tmp_path)
    follow_with(server, PROGRESS, JobEvent(event="error", job_id="j", error=error))
    (row,) = await train(app, train_body(choice()))
    assert set(row) == {"error"} and all(text in row["error"] for text in texts)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (train_body(trajectory_groups=[]), "no trajectories were collected"),
        (train_body(), "nothing to train"),
        (
            train_body(choice(token_ids=None, logprobs=None, finish_reason="stop")),
            "Sample from this server",
        ),
        (train_body(choice(), config={"learning_rate": -1}), "learning_rate"),
        (train_body(choice(), trajectory_groups=[{"trajectories": 1}]), "trajectories"),
    ],
)
async def test_what_cannot_be_trained_is_reported_in_the_stream(
    tmp_path: Path, body: dict[str, Any], text: str
) -> None:
    app, server = make(tmp_path)
    (row,) = await train(app, body)
    assert set(row) == {"error"}
    assert re.search(text, row["error"], re.DOTALL), row
    assert not server.queue.waiting()


async def test_a_call_without_a_key_is_always_a_new_job(tmp_path: Path) -> None:
    app, server = make(tmp_path)
    follow_with(server, DONE)
    for _ in range(2):
        await train(app, train_body(choice(5), choice(6)))
    first = server.queue.get(server.queue.waiting()[0].job_id)
    assert first.report.turns == {"ids": 2}
    server.queue.set_done(first.job_id, {}, first.report)
    second = server.queue.get(server.queue.waiting()[0].job_id)
    assert second.job_id != first.job_id


async def test_registering_again_notes_what_comes_too_late(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    app, server = make(tmp_path)
    engine_args = {"tensor_parallel_size": 2, "max_logprobs": 20, "gpu_memory_utilization": 0.9}
    config = {"init_args": {"max_seq_length": 512}, "engine_args": engine_args | {"headless": True}}
    async with client(app) as http:
        assert (await http.post("/register", json=MODEL)).json() == {"notes": []}
        asked = MODEL | {"_internal_config": config}
        notes = (await http.post("/register", json=asked)).json()["notes"]
        injected = {"engine_args": {"quantization": "--trust-remote-code"}}
        refused = await http.post("/register", json=MODEL | {"_internal_config": injected})
    assert any("engine_args.headless has no effect" in note for note in notes)
    late = "is not applied: the engine was started with"
    assert any(f"tensor_parallel_size=2 {late} 1" in note for note in notes)
    assert any(f"max_seq_length=512 {late} 4096" in note for note in notes)
    assert not any("max_logprobs" in note for note in notes)
    assert notes[1] in caplog.text
    assert refused.status_code == 422 and "quantization" in refused.json()["error"]["message"]
    model = server.registry.get("p", "run")
    assert model.record.always_logprobs and model.folder.read().always_logprobs


async def test_our_own_registration_takes_engine_arguments_too(tmp_path: Path) -> None:
    app, _ = make(tmp_path)
    body = {"name": "run", "project": "p", "base_model": "art/tiny"}
    asked = {
        "tensor_parallel_size": 2,
        "max_seq_length": 512,
        "headless": True,
        "max_logprobs": None,
        "record_distributions": True,  # a CPU does
    }
    async with client(app) as http:
        assert "notes" not in (await http.post("/api/models", json=body)).json()
        answer = (await http.post("/api/models", json=body | {"engine_args": asked})).json()
        injected = {"engine_args": {"quantization": "--trust-remote-code"}}
        refused = await http.post("/api/models", json=body | injected)
    late = "is not applied: the engine was started with"
    assert [note.partition(" Such")[0].rstrip(".") for note in answer["notes"]] == [
        "engine_args.headless has no effect here",
        f"tensor_parallel_size=2 {late} 1",
        f"max_seq_length=512 {late} 4096",
    ]
    assert refused.status_code == 422 and refused.json()["error"]["param"] == "quantization"


def test_requested_arguments_fill_up_what_the_command_line_left_open() -> None:
    requested = {"max_seq_length": "4096", "seed": "1", "max_logprobs": "5"}
    config = ServerConfig(engine_args={"seed": "2"}).with_requested(requested, 2048)
    assert config.max_seq_length == 2048
    assert config.engine_args == {"seed": "2", "max_logprobs": "5"}
    assert ServerConfig(max_seq_length=512).with_requested(requested, 2048).max_seq_length == 512


async def test_registering_again_starts_a_failed_engine_with_the_new_arguments(
    tmp_path: Path,
) -> None:
    app, server = make(tmp_path)
    engine: Any = FakeEngine()
    engine.state, engine.base, engine.max_seq_length = "failed", None, 512
    server = dataclasses.replace(server, fleet=engine)
    server.base._fleet = server.registration._fleet = engine
    app = make_app(server, inference_port=None)
    config = {"init_args": {"max_seq_length": 512}, "engine_args": {"tensor_parallel_size": 1}}
    asked = MODEL | {"_internal_config": config}
    async with client(app) as http:
        for _ in range(2):
            assert (await http.post("/register", json=asked)).status_code == 200
    assert engine.started == [{"tensor_parallel_size": "1", "max_seq_length": "512"}]


async def test_the_small_routes_answer_as_arts_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    app, _ = make(tmp_path)
    async with client(app) as http:
        assert (await http.get("/healthcheck")).json() == {"status": "ok"}
        assert (await http.post("/close")).json() is None
        assert (await http.post("/_get_step", json=MODEL)).json() == 0
        body = {"model": MODEL, "steps_to_keep": [0]}
        assert (await http.post("/_delete_checkpoint_files", json=body)).status_code == 200
        bare = {"model": MODEL | {"_internal_config": None}}
        assert (await http.post("/_delete_checkpoint_files", json=bare)).status_code == 422
        refused = await http.post("/_train_model", json=bare | {"trajectory_groups": 1})
        assert "trajectory_groups" in refused.json()["error"]
        assert "not JSON" in (await http.post("/_train_model", content=b"{")).json()["error"]
        path = "/_delete_checkpoints?benchmark=val/reward&benchmark_smoothing=0.5"
        assert (await http.post(path, json=MODEL)).status_code == 200
        log = {"model": MODEL, "trajectory_groups": train_body(choice())["trajectory_groups"]}
        assert (await http.post("/_log", json=log | {"split": "val", "step": 9})).status_code == 200
        nobody = MODEL | {"name": "nobody"}
        unknown = await http.post("/_get_step", json=nobody)
        assert (await http.post("/_train_model", json=train_body(choice(), model=nobody))).status_code == 404
    assert unknown.status_code == 404 and "register it first" in unknown.text
    rows = files.read_lines(ModelFolder(tmp_path, "p", "run").history_file)
    assert [(row["step"], row["val/reward"]) for row in rows] == [(0, 0.0)]
    assert "p/run: 'step has no effect here'" in caplog.messages


async def test_the_base_url_is_the_host_that_was_asked(tmp_path: Path) -> None:
    app, _ = make(tmp_path)
    body = {"model": MODEL, "config": None}
    for host in ("127.0.0.1", "localhost", "0.0.0.0"):
        async with client(app, host) as http:
            reply = await http.post("/_prepare_backend_for_training", json=body)
        assert reply.json() == [f"http://{host}:8000/v1", "default"]
    behind_tls = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="https://localhost:8443")
    async with behind_tls as http:
        reply = await http.post("/_prepare_backend_for_training", json=body)
    assert reply.json()[0] == "https://localhost:8443/v1", "a proxy's, which has one port"


async def test_the_key_that_is_handed_out_opens_its_model_only(tmp_path: Path) -> None:
    app, server = make(tmp_path, api_keys=KEYS)
    body = {"model": MODEL, "config": {"log_file": "/etc/passwd"}}
    everything = {"authorization": "Bearer all"}
    async with client(app, "box", headers=everything) as http:
        _, key = (await http.post("/_prepare_backend_for_training", json=body)).json()
    async with client(app, "box", headers={"authorization": f"Bearer {key}::session"}) as http:
        cards = (await http.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["p/run", "run"]
        for asked in ("art/tiny", "q/run"):
            chat = {"model": asked, "messages": []}
            assert (await http.post("/v1/chat/completions", json=chat)).status_code == 404
        for path in ("/_get_step", "/_train_model", "/api/models"):
            assert (await http.post(path, json=MODEL)).status_code == 401
    secret = tmp_path / ".server" / "model_keys_secret"
    assert secret.stat().st_mode & 0o077 == 0 and len(secret.read_bytes()) == 32
    spoilt = [key[:-1], key.replace("run", "ran"), key.replace(":", ":x:", 1), ""]
    async with client(app, "box") as http:
        for spoilt_key in spoilt:
            headers = {"authorization": f"Bearer {spoilt_key}"}
            assert (await http.get("/v1/models", headers=headers)).status_code == 401
    config = server.config.model_copy(update={"api_keys": KEYS[1:]})
    again = make_app(dataclasses.replace(server, config=config), inference_port=None)
    async with client(again, "box", headers={"authorization": f"Bearer {key}"}) as http:
        assert (await http.get("/v1/models")).status_code == 401


async def test_another_projects_key_is_refused(tmp_path: Path) -> None:
    app, _ = make(tmp_path, api_keys=KEYS)
    async with client(app, headers={"x-api-key": "other"}) as http:
        for path in ("/register", "/_get_step"):
            assert (await http.post(path, json=MODEL)).status_code == 403
        assert (await http.post("/_train_model", json=train_body(choice()))).status_code == 403


async def test_the_legacy_flag_opens_these_routes_only(tmp_path: Path) -> None:
    app, _ = make(tmp_path, api_keys=KEYS, legacy_without_key=True)
    async with client(app, "box") as http:
        for path, item in app.openapi()["paths"].items():
            for method in item:
                response = await http.request(method.upper(), path)
                is_open = path in ART_PATHS or path in ("/health", "/ready")
                assert (response.status_code != 401) == is_open, path
        page = {"origin": "http://evil.example"}
        assert (await http.post("/_get_step", json=MODEL, headers=page)).status_code == 403
        wrong = {"authorization": "Bearer wrong"}
        assert (await http.post("/_get_step", json=MODEL, headers=wrong)).status_code == 401
        assert (await http.post("/_get_step", json=MODEL)).json() == 0
        body = {"model": MODEL, "config": None}
        url, key = (await http.post("/_prepare_backend_for_training", json=body)).json()
        assert url == "http://box:8000/v1"
        headers = {"authorization": f"Bearer {key}"}
        assert (await http.get("/v1/models", headers=headers)).status_code == 200
    assert set(app.openapi()["paths"]) >= ART_PATHS
