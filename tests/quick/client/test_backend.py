import asyncio
import copy
import pickle

import pytest

import art
from art.waiting import waiting_for
from tests.waiting import until

pytestmark = pytest.mark.anyio


INFO_BODY = {
    "name": "agent",
    "project": "demo",
    "base_model": "art/tiny",
    "inference_name": "demo/agent",
    "lora": {},
}


def make_model() -> art.TrainableModel:
    return art.TrainableModel(name="agent", project="demo", base_model="art/tiny")


async def test_registering_makes_the_model_and_learns_its_address(server, backend: art.Backend):
    model = make_model()
    model.lora = art.LoRAConfig(rank=4)
    await model.register(backend)
    await model.register(backend)  # takes it up again
    body = {"name": "agent", "project": "demo", "base_model": "art/tiny"}
    lora = {"rank": 4, "alpha": 16.0, "target_modules": None}
    assert [r.json() for r in server.sent("POST", "/api/models")] == [{**body, "lora": lora}] * 2
    assert model.inference_base_url == f"{server.url}/v1"
    assert (model.inference_model_name, model.inference_api_key) == ("demo/agent", "default")
    assert await model.get_step() == 3


async def test_a_registration_requests_the_models_engine_arguments(server, backend: art.Backend):
    model = make_model()
    model.engine_args = {"max_seq_length": 512}
    await model.register(backend)
    assert server.sent("POST", "/api/models")[0].json()["engine_args"] == {"max_seq_length": 512}
    assert "engine_args" in model.model_dump() and "engine_args" not in make_model().model_dump()


async def test_no_server_is_reported_at_once():
    async with art.Backend("http://127.0.0.1:9") as backend:
        with pytest.raises(art.ArtConnectionError) as caught:
            await make_model().register(backend)
    assert isinstance(caught.value, ConnectionError) and caught.value.retryable


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_address_may_end_in_a_slash_or_v1(server, suffix: str):
    async with art.Backend(server.url + suffix) as backend:
        model = make_model()
        await model.register(backend)
    assert model.inference_base_url == f"{server.url}/v1"


def test_address_without_a_scheme_is_refused():
    with pytest.raises(ValueError, match="base_url"):
        art.Backend("localhost:7623")


def test_environment_fills_in_what_is_not_given(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ART_SERVER_URL", raising=False)
    monkeypatch.delenv("ART_API_KEY", raising=False)
    assert repr(art.Backend()) == "Backend(base_url='http://127.0.0.1:7623', api_key=None)"
    monkeypatch.setenv("ART_SERVER_URL", "http://box:1")
    monkeypatch.setenv("ART_API_KEY", "secret")
    assert repr(art.Backend()) == "Backend(base_url='http://box:1', api_key='***')"
    assert "http://other:2" in repr(art.Backend("http://other:2"))


async def test_key_is_sent_and_never_shown(server):
    async with art.Backend(server.url, "secret") as backend:
        model = make_model()
        await model.register(backend)
        assert "secret" not in repr(backend) + repr(model)
    assert {r.headers["authorization"] for r in server.requests} == {"Bearer secret"}
    assert model.inference_api_key == "secret"


async def test_a_key_from_a_file_has_no_white_space_and_no_error_shows_it(server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ART_API_KEY", "secret\n")
    async with art.Backend(server.url) as backend:
        model = make_model()
        await model.register(backend)
    assert {r.headers["authorization"] for r in server.requests} == {"Bearer secret"}
    prompted = art.Model(name="gpt", project="p", inference_api_key=" secret\n")
    assert prompted.inference_api_key == "secret"
    prompted.inference_base_url, prompted.inference_api_key = "http://box/v1", "sec\nret"
    for refused in (lambda: art.Backend(api_key="sec\nret"), prompted.openai_client):
        with pytest.raises(ValueError, match="API key") as caught:
            refused()
        assert "sec" not in str(caught.value)


async def test_a_header_that_http_refuses_is_not_shown_and_not_tried_again(server):
    async with art.Backend(server.url) as backend:
        backend._connection.api_key = "sec\nret"
        with pytest.raises(art.ArtError) as caught:
            await make_model().register(backend)
    assert "sec" not in str(caught.value) and not caught.value.retryable
    assert caught.value.__cause__ is None and not server.requests


async def test_refusal_carries_what_the_server_said(server, answer, backend: art.Backend):
    error = {
        "message": "model 'agent' is on base 'b'",
        "code": "base_mismatch",
        "param": "base_model",
    }
    server.on("POST", "/api/models", answer(409, {"error": error}))
    with pytest.raises(art.ArtStatusError) as caught:
        await make_model().register(backend)
    refusal = caught.value
    assert str(refusal) == "model 'agent' is on base 'b' [409 from POST /api/models]"
    assert (refusal.status, refusal.code, refusal.param, refusal.retryable) == (
        *(409, "base_mismatch", "base_model"),
        False,
    )


@pytest.mark.parametrize("status", [400, 403, 404, 413, 422, 500])
async def test_other_refusals_show_their_text(server, answer, backend, status: int):
    server.on("POST", "/api/models", answer(status, b"<html>no"))
    with pytest.raises(art.ArtStatusError, match="<html>no") as caught:
        await make_model().register(backend)
    assert (caught.value.status, caught.value.retryable) == (status, False)
    posted = [request for request in server.requests if request.method == "POST"]
    assert len(posted) == 1, "another try would get the same answer"


def test_errors_can_be_copied_and_pickled():
    status = art.ArtStatusError("no", status=404, code="unknown_model", retryable=True)
    job = art.ArtJobError("no", job_id="j", code="oom")
    for error in (status, job, art.ArtConnectionError("gone", retryable=True)):
        for again in (copy.copy(error), pickle.loads(pickle.dumps(error))):
            assert vars(again) == vars(error) and str(again) == str(error)


async def test_calls_wait_for_a_server_that_is_being_restarted(server, answer, model, caplog: pytest.LogCaptureFixture):
    answers = [answer(503, {"error": {"message": "starting", "retryable": True}})]
    answers.append(answer(body={**INFO_BODY, "step": 8}))
    server.on("GET", "/api/models/demo/agent", lambda _: answers.pop(0))
    await server.stop()
    step = asyncio.create_task(model.get_step())
    await until(lambda: caplog.records, lambda: "the client tries again without a warning")
    await server.start()
    assert await step == 8


async def test_server_that_stays_away_is_an_error_in_the_end(server):
    async with art.Backend(server.url, reconnect_seconds=0.2) as backend:
        model = make_model()
        await model.register(backend)
        await server.stop()
        with pytest.raises(art.ArtConnectionError):
            await model.get_step()
        await server.start()


async def test_log_sends_bare_trajectories_as_one_group(server, answer, model):
    row = {"val/reward": 0.5}
    server.on("POST", "/api/models/demo/agent/log", answer(body={"step": 3, "metrics": row}))
    trajectories = [art.Trajectory(reward=0), art.Trajectory(reward=1), ValueError("failed")]
    assert await model.log(trajectories) == row
    await model.log([art.TrajectoryGroup(trajectories)], split="test", step=2, metrics={"a": 1.0})
    first, second = (r.json() for r in server.sent("POST", "/api/models/demo/agent/log"))
    assert (first["split"], first["step"], first["metrics"]) == ("val", None, {})
    assert (second["split"], second["step"], second["metrics"]) == ("test", 2, {"a": 1.0})
    assert first["groups"] == second["groups"] and len(first["groups"]) == 1
    assert len(first["groups"][0]["trajectories"]) == 2
    assert first["groups"][0]["exceptions"][0]["type"] == "ValueError"


async def test_log_is_not_repeated_once_it_may_have_arrived(server, answer, model):
    server.on("POST", "/api/models/demo/agent/log", answer(hang_up=True))
    with pytest.raises(art.ArtConnectionError):
        await model.log([art.Trajectory()])
    assert len(server.sent("POST", "/api/models/demo/agent/log")) == 1


async def test_log_is_not_repeated_after_a_gateway_gave_up(server, answer, model):
    server.on("POST", "/api/models/demo/agent/log", answer(504, b"<html>Gateway Time-out</html>"))
    with pytest.raises(art.ArtStatusError) as caught:
        await model.log([art.Trajectory()])
    assert caught.value.status == 504
    assert len(server.sent("POST", "/api/models/demo/agent/log")) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_this_machine_is_reached_without_its_proxy(server, answer, monkeypatch: pytest.MonkeyPatch, host: str):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    body = {"id": "c", "object": "chat.completion", "choices": []}
    server.on("POST", "/v1/chat/completions", answer(body=body))
    async with art.Backend(f"http://{host}:{server.port}") as backend:
        model = make_model()
        await model.register(backend)
        client = model.openai_client()
        completion = await client.chat.completions.create(model="m", messages=[])
        assert completion.id == "c"
        assert await waiting_for(backend.base_url, None)._health() is not None


async def test_checkpoints_are_deleted_by_metric_or_by_step(server, answer, backend, model):
    path = "/api/models/demo/agent/checkpoints/delete"
    server.on("POST", path, answer(body={"kept": [2, 3], "deleted": [1]}))
    reply = await model.delete_checkpoints()
    assert (reply.kept, reply.deleted) == ([2, 3], [1])
    await model.delete_checkpoints("val/accuracy")
    await model.delete_checkpoints(keep=[2])
    bodies = [request.json() for request in server.sent("POST", path)]
    assert bodies == [
        {"best_metric": None, "keep": None},
        {"best_metric": "val/accuracy", "keep": None},
        {"best_metric": None, "keep": [2]},
    ]


async def test_checkpoints_are_listed(server, answer, model):
    row = {"step": 3, "created_at": 1.5, "metrics": {"val/reward": 0.5}, "size_bytes": 10}
    path = "/api/models/demo/agent/checkpoints"
    body = {"checkpoints": [row | {"is_best": True}], "best_metric": "val/reward"}
    server.on("GET", path, answer(body=body))
    (checkpoint,) = await model.checkpoints()
    assert (checkpoint.step, checkpoint.metrics) == (3, {"val/reward": 0.5})
    assert (checkpoint.is_best, checkpoint.is_serving) == (True, False)


async def test_a_fork_is_a_registered_model_of_its_own(server, answer, model, caplog):
    info = {**INFO_BODY, "project": "other", "name": "twin", "step": 2, "lora": {"rank": 4}, "notes": ["count on"]}
    server.on("POST", "/api/models/demo/agent/fork", answer(body=info))
    server.on("POST", "/api/models", answer(body=info))
    model.run_name, model.config = "agent", {"mine": 1}
    twin = await model.fork("twin", project="other", step=2)
    assert "fork: count on" in caplog.messages
    (sent,) = server.sent("POST", "/api/models/demo/agent/fork")
    assert sent.json() == {"name": "twin", "project": "other", "step": 2}
    registered = server.sent("POST", "/api/models")[-1].json()
    assert (registered["name"], registered["lora"]["rank"]) == ("twin", 4)
    assert twin.get_inference_name() == "other/twin" and twin.config == {"mine": 1}
    assert twin.openai_client() is not model.openai_client()
    assert model.get_inference_name() == "demo/agent"


async def test_a_model_is_rolled_back_and_deleted(server, answer, model):
    server.on("POST", "/api/models/demo/agent/rollback", answer(body={**INFO_BODY, "step": 1}))
    server.on("DELETE", "/api/models/demo/agent", answer(body={**INFO_BODY, "step": 1}))
    await model.rollback(1)
    assert server.sent("POST", "/api/models/demo/agent/rollback")[0].json() == {"step": 1}
    assert model.backend()._steps == {"demo/agent": 1}, "the steps that Ctrl-C names"
    backend = model.backend()
    await model.delete()
    assert backend._steps == {}
    assert len(server.sent("DELETE", "/api/models/demo/agent")) == 1


def test_backend_works_in_one_event_loop_after_another(answer, make_server):
    async def program(fake) -> int:
        fake.on("POST", "/api/models", answer(body={**INFO_BODY, "step": 0}))
        fake.on("GET", "/health", answer(body={}))
        fake.on("GET", "/api/models/demo/agent", answer(body={**INFO_BODY, "step": 5}))
        await fake.start()
        backend._connection.base_url = fake.url
        await model.register(backend)
        step = await model.get_step()
        await backend.close()
        await fake.stop()
        return step

    backend, model = art.Backend("http://127.0.0.1:1"), make_model()
    assert asyncio.run(program(make_server())) == 5
    assert asyncio.run(program(make_server())) == 5
