import asyncio
import hashlib
import math
import re
from typing import Any

import numpy as np
import pytest
from openai.types.chat.chat_completion import Choice

import art
from tests.refusals import refused
from tests.waiting import until

pytestmark = pytest.mark.anyio

TRAIN = "/api/models/demo/agent/train"
EVENTS = "/api/jobs/j1/events"
REPORT = {"num_trajectories": 2, "num_trajectories_trained": 2, "turns": {"ids": 2}}
ACCEPTED = {"event": "accepted", "job_id": "j1", "report": REPORT}
WAITING = {"event": "waiting", "job_id": "j1", "phase": "queued"}
PROGRESS = {
    "event": "progress",
    "job_id": "j1",
    "phase": "train",
    "completed": 1,
    "total": 2,
    "metrics": {"loss/policy": 0.25},
}
DONE = {"event": "done", "job_id": "j1", "step": 4, "metrics": {"loss/policy": 0.5}}


def keys(server) -> list[str]:
    return [request.headers["idempotency-key"] for request in server.sent("POST", TRAIN)]


async def test_train_returns_step_metrics_and_report(server, answer, model, groups):
    server.on("POST", TRAIN, answer(lines=[ACCEPTED, WAITING, PROGRESS, DONE]))
    result = await model.train(groups, config=art.TrainConfig(learning_rate=1e-5))
    assert (result.step, result.metrics) == (4, {"loss/policy": 0.5})
    assert result.report.turns == {"ids": 2}
    (request,) = server.sent("POST", TRAIN)
    body = request.json()
    assert body["config"]["learning_rate"] == 1e-5
    assert [t["reward"] for t in body["groups"][0]["trajectories"]] == [0.0, 1.0]


async def test_each_call_has_a_key_of_its_own_unless_given(server, answer, model, groups):
    server.on("POST", TRAIN, lambda _: answer(lines=[ACCEPTED, DONE]))
    await model.train(iter(groups))
    await model.train(groups, verbose=False, config=art.TrainConfig())
    await model.train(groups, idempotency_key="step-7")
    first, second, third = keys(server)
    assert len({first, second}) == 2 and third == "step-7"


def sampled(number: int, **fields: Any) -> dict[str, Any]:
    """A choice that the server recorded, with its tokens."""
    mark = {"id": f"c-{number}", "step": 3, "model": "demo/agent"}
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": f"answer {number}"},
        "logprobs": {"content": [{"token": "a", "logprob": -0.5, "bytes": [97]}]},
        "token_ids": [7, 8],
        "prompt_token_ids": [1, 2, 3],
        "art": mark,
    }
    return choice | fields


def of_choices(*entries: Any) -> list[art.TrajectoryGroup]:
    history = art.History(messages_and_choices=[entries[-1]])
    return [art.TrajectoryGroup([art.Trajectory(messages_and_choices=[*entries], additional_histories=[history])])]


BARE = {"index": 0, "finish_reason": "stop"}


async def test_a_recorded_choice_is_sent_as_its_id_and_its_message(server, answer, model):
    server.on("POST", TRAIN, answer(lines=[ACCEPTED, DONE]))
    tokenless = sampled(2, token_ids=None, prompt_token_ids=None, logprobs=None)
    foreign = sampled(3, art=None)
    whole = [sampled(0), Choice.model_construct(**sampled(1)), tokenless, foreign]
    await model.train(of_choices(*whole))
    sent = server.sent("POST", TRAIN)[0].json()["groups"][0]["trajectories"][0]
    entries = [
        *sent["messages_and_choices"],
        *sent["additional_histories"][0]["messages_and_choices"],
    ]
    expected = [
        {**BARE, "message": choice["message"], "art": choice["art"]} for choice in (sampled(0), sampled(1), sampled(2))
    ]
    for choice in expected[:2]:
        choice["by_reference"] = True
    assert entries == [*expected, foreign, foreign]


async def test_choices_whose_records_are_missing_are_sent_whole_under_the_same_key(server, answer, model):
    error = {"message": "gone", "code": "records_missing", "ids": ["c-1"]}
    second = error | {"ids": ["c-0"]}
    attempts = [answer(409, {"error": error}), answer(409, {"error": second})]
    attempts.append(answer(lines=[ACCEPTED, DONE]))
    server.on("POST", TRAIN, lambda _: attempts.pop(0))
    await model.train(of_choices(sampled(0), sampled(1), sampled(2)))
    requests = server.sent("POST", TRAIN)
    whole_ids = [
        [
            entry["art"]["id"]
            for entry in request.json()["groups"][0]["trajectories"][0]["messages_and_choices"]
            if entry.get("token_ids") == [7, 8] and entry["prompt_token_ids"] and entry["logprobs"]
        ]
        for request in requests
    ]
    assert whole_ids == [[], ["c-1"], ["c-0", "c-1"]]
    assert len(set(keys(server))) == 1
    digest = hashlib.sha256(requests[0].body).hexdigest()
    told = [request.headers.get("x-art-request-digest") for request in requests]
    assert told == [None, digest, digest]


async def test_a_server_that_keeps_asking_for_the_same_choices_ends_the_call(server, answer, model):
    error = {"message": "gone", "code": "records_missing", "ids": ["c-0"]}
    server.on("POST", TRAIN, answer(409, {"error": error}))
    with refused(art.ArtStatusError, "records_missing"):
        await model.train(of_choices(sampled(0)))
    assert len(server.sent("POST", TRAIN)) == 2


async def test_logged_choices_are_without_tokens(server, answer, model):
    server.on("POST", "/api/models/demo/agent/log", answer(body={"step": 3, "metrics": {}}))
    await model.log(of_choices(sampled(0), sampled(1, art=None)), split="val")
    sent = server.sent("POST", "/api/models/demo/agent/log")[0].json()
    for entry in sent["groups"][0]["trajectories"][0]["messages_and_choices"]:
        assert entry.keys() <= {"index", "finish_reason", "message", "art"}


async def test_stream_lost_after_acceptance_is_taken_up_again(server, answer, model, groups):
    server.on("POST", TRAIN, answer(lines=[ACCEPTED, PROGRESS], hang_up=True))
    attempts = [
        answer(lines=[PROGRESS]),  # ends without an end
        answer(lines=[ACCEPTED, PROGRESS, DONE]),
    ]
    server.on("GET", EVENTS, lambda _: attempts.pop(0))
    result = await model.train(groups)
    assert (result.step, result.report.num_trajectories) == (4, 2)
    assert len(server.sent("POST", TRAIN)) == 1 and len(server.sent("GET", EVENTS)) == 2


async def test_request_lost_before_acceptance_is_repeated_under_its_key(server, answer, model, groups):
    jobs: dict[str, str] = {}

    def accept(request):
        key = request.headers["idempotency-key"]
        if key not in jobs:
            jobs[key] = "j1"
            return answer(hang_up=True)
        return answer(lines=[ACCEPTED, DONE])

    server.on("POST", TRAIN, accept)
    assert (await model.train(groups)).step == 4
    assert len(jobs) == 1 and len(keys(server)) == 2


async def test_train_survives_a_restart_of_the_server(server, answer, model, groups, caplog):
    accepted = asyncio.Event()

    def accept(request):
        accepted.set()
        return answer(lines=[ACCEPTED], hang_up=True)

    server.on("POST", TRAIN, accept)
    server.on("GET", EVENTS, answer(lines=[DONE]))
    train = asyncio.create_task(model.train(groups))
    await accepted.wait()
    await server.stop()
    await until(lambda: caplog.records)
    await server.start()
    assert (await train).step == 4


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_unavailable_server_is_asked_again(server, answer, model, groups, status: int):
    attempts = [answer(status, b"proxy says no"), answer(lines=[ACCEPTED, DONE])]
    server.on("POST", TRAIN, lambda _: attempts.pop(0))
    assert (await model.train(groups)).step == 4
    assert len(set(keys(server))) == 1


async def test_refused_request_is_raised_at_once(server, answer, model, groups):
    error = {"message": "too large", "code": "too_large", "retryable": False}
    server.on("POST", TRAIN, answer(413, {"error": error}))
    with refused(art.ArtStatusError, "too_large"):
        await model.train(groups)
    assert len(server.sent("POST", TRAIN)) == 1


async def test_failed_job_is_an_error_with_its_code(server, answer, model, groups):
    error = {"message": "out of memory", "code": "oom", "retryable": True}
    failed = {"event": "error", "job_id": "j1", "error": error}
    server.on("POST", TRAIN, answer(lines=[ACCEPTED, failed]))
    with pytest.raises(art.ArtJobError, match="out of memory") as caught:
        await model.train(groups)
    assert (caught.value.job_id, caught.value.code, caught.value.retryable) == ("j1", "oom", True)


async def test_server_that_stays_away_ends_the_call(server, answer, groups):
    server.on("POST", TRAIN, answer(hang_up=True))
    async with art.Backend(server.url, reconnect_seconds=0.2) as backend:
        model = art.TrainableModel(name="agent", project="demo", base_model="art/tiny")
        await model.register(backend)
        with pytest.raises(art.ArtConnectionError):
            await model.train(groups)


async def test_line_that_is_no_event_is_an_error(server, answer, model, groups):
    server.on("POST", TRAIN, answer(lines=[{"hello": 1}]))
    with pytest.raises(art.ArtError):
        await model.train(groups)


async def test_unknown_fields_of_events_are_ignored(server, answer, model, groups):
    server.on("POST", TRAIN, answer(lines=[ACCEPTED, {**DONE, "invented_later": 1}]))
    assert (await model.train(groups)).step == 4


@pytest.mark.parametrize(
    ("spoil", "path"),
    [
        ({"reward": math.nan}, ".reward"),
        ({"reward": None}, ".reward"),
        ({"metrics": {"m": math.inf}}, ".metrics.m"),
        ({"metrics": {"m": "high"}}, ".metrics.m"),
        ({"metrics": {"m": 10**400}}, ".metrics.m"),
        ({"metadata": {"m": np.arange(3)}}, ".metadata"),
        ({"messages_and_choices": [{"role": "tool", "content": "\ud83d"}]}, ".messages_and_choices"),
        ({"messages_and_choices": ["hi"]}, ".messages_and_choices"),
    ],
)
async def test_what_cannot_be_trained_on_is_named_before_it_is_sent(server, model, groups, spoil: dict, path: str):
    for name, value in spoil.items():
        setattr(groups[0].trajectories[1], name, value)
    with pytest.raises(ValueError, match=re.escape(f"groups[0].trajectories[1]{path}")):
        await model.train(groups)
    assert server.sent("POST", TRAIN) == []


async def test_an_error_with_half_a_surrogate_pair_loses_no_group(server, answer, model, groups):
    """As a tool raises it that looks up a name from `json.loads('"\\\\ud83d"')`."""
    server.on("POST", TRAIN, answer(lines=[ACCEPTED, DONE]))
    failed = art.TrajectoryGroup([LookupError("no city \ud83d")])
    await model.train([*groups, failed])
    sent = server.sent("POST", TRAIN)[0].json()["groups"][1]["exceptions"][0]
    assert "no city \\ud83d" in sent["message"]


async def test_no_groups_and_empty_groups_are_refused(model):
    with pytest.raises(ValueError, match="groups"):
        await model.train([])
    with pytest.raises(ValueError, match=r"groups\[0\]"):
        await model.train([art.TrajectoryGroup([])])
    with pytest.raises(TypeError, match=r"groups\[0\]"):
        await model.train([art.Trajectory()])


async def test_group_that_was_not_awaited_is_refused(model):
    async def rollout() -> art.Trajectory:
        return art.Trajectory()

    group = art.TrajectoryGroup([rollout()])
    with pytest.raises(RuntimeError, match="await"):
        await model.train([group])
    await group


async def test_group_of_failures_is_sent_for_the_server_to_count(server, answer, model, groups):
    server.on("POST", TRAIN, answer(lines=[ACCEPTED, DONE]))
    await model.train([*groups, art.TrajectoryGroup([ValueError("failed")])])
    failed = server.sent("POST", TRAIN)[0].json()["groups"][1]
    assert failed["trajectories"] == [] and failed["exceptions"][0]["message"] == "failed"


async def test_what_was_not_trained_is_reported(server, answer, model, groups, caplog: pytest.LogCaptureFixture):
    path = "groups[0].trajectories[1]"
    report = {
        "num_trajectories": 2,
        "num_trajectories_trained": 1,
        "dropped": [
            {"reason": "too long", "count": 1, "examples": [path]},
            {"reason": "the rollout failed", "count": 2, "unit": "rollout"},
        ],
    }
    server.on("POST", TRAIN, answer(lines=[{**ACCEPTED, "report": report}, DONE]))
    await model.train(groups)
    assert (
        "train: 1 of 2 trajectories trained. Left out: 1 turn, because too long; 2 rollouts, because the rollout failed. "
        f"For example {path}."
    ) in caplog.messages


async def test_bar_is_shown_where_asked_for(server, answer, model, groups, capsys):
    server.on("POST", TRAIN, lambda _: answer(lines=[ACCEPTED, PROGRESS, DONE]))
    await model.train(groups)
    assert capsys.readouterr().err == ""
    await model.train(groups, verbose=True)
    assert "train (train):  50%" in capsys.readouterr().err


async def test_submit_returns_when_the_job_is_accepted_and_the_job_gives_the_result(server, answer, model, groups):
    server.on("POST", TRAIN, answer(lines=[ACCEPTED, WAITING], hang_up=True))
    job = await model.submit(groups, art.TrainConfig(learning_rate=1e-5), idempotency_key="mine", expected_step=3)
    assert job.job_id == "j1"
    assert model.backend()._coming_steps() == {"demo/agent": 4}
    (request,) = server.sent("POST", TRAIN)
    assert (request.headers["idempotency-key"], request.json()["expected_step"]) == ("mine", 3)
    assert request.json()["config"]["learning_rate"] == 1e-5
    server.on("GET", EVENTS, answer(lines=[ACCEPTED, PROGRESS, DONE]))
    first, second = await asyncio.gather(asyncio.ensure_future(job), asyncio.ensure_future(job))
    assert first is second is await job
    assert (first.step, first.metrics, first.report.turns) == (4, {"loss/policy": 0.5}, {"ids": 2})
    assert len(server.sent("GET", EVENTS)) == 1, "it is followed once"
    assert model.backend()._coming_steps() == {}


async def test_a_submitted_job_that_fails_is_an_error_where_it_is_awaited(server, answer, model, groups):
    server.on("POST", TRAIN, answer(lines=[ACCEPTED], hang_up=True))
    failed = {"event": "error", "job_id": "j1", "error": {"message": "out of memory", "code": "oom"}}
    server.on("GET", EVENTS, answer(lines=[failed]))
    job = await model.submit(groups)
    for _ in range(2):
        with refused(art.ArtJobError, "oom"):
            await job


async def test_submit_sends_missing_records_whole_and_survives_a_restart(server, answer, model):
    error = {"message": "gone", "code": "records_missing", "ids": ["c-0"]}
    attempts = [answer(409, {"error": error}), answer(hang_up=True), answer(lines=[ACCEPTED], hang_up=True)]
    server.on("POST", TRAIN, lambda _: attempts.pop(0))
    job = await model.submit(of_choices(sampled(0)))
    assert len(set(keys(server))) == 1 and len(keys(server)) == 3
    events = [answer(503, b"not yet"), answer(lines=[DONE])]
    server.on("GET", EVENTS, lambda _: events.pop(0))
    assert (await job).step == 4


async def test_a_refused_submit_is_raised_at_once(server, answer, model, groups):
    error = {"message": "the model has a job", "code": "step_moved"}
    server.on("POST", TRAIN, answer(409, {"error": error}))
    with refused(art.ArtStatusError, "step_moved"):
        await model.submit(groups, expected_step=1)
