import pytest

import art
from art import bars, waiting
from tests.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(waiting, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(waiting, "_known", {})


async def said_with(text: str, capsys, times: int = 1) -> str:
    """What was printed until the text was there so many times."""
    said = ""

    def is_there() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return said.count(text) >= times

    await until(is_there)
    return said


async def server_was_asked(server, times: int = 3) -> None:
    """Until the server was asked so many more times what a call waits for."""
    before = len(server.sent("GET", "/health"))
    await until(lambda: len(server.sent("GET", "/health")) >= before + times)


async def test_what_a_request_waits_for_is_said_once_a_minute(server, answer, capsys) -> None:
    health = {"engine": "ready", "waits_for": "a step of 'p/b', which trains"}
    server.on("GET", "/health", answer(200, health))
    calls = waiting.waiting_for(server.url, "secret")
    with calls.call("a request"), calls.call("a request"):
        told = await said_with("which trains", capsys)
        await server_was_asked(server)
    told += capsys.readouterr().err
    assert told.count("art: a request has waited 0 s for a step of 'p/b', which trains") == 1
    assert server.sent("GET", "/health")[0].headers["authorization"] == "Bearer secret"
    assert "secret" not in told


async def test_each_of_consecutive_calls_is_watched(server, answer, capsys) -> None:
    server.on("GET", "/health", answer(200, {"engine": "ready", "waits_for": "a step"}))
    calls = waiting.waiting_for(server.url, None)
    with calls.call("the first"):  # one that does not wait
        pass
    with calls.call("the second"):
        assert "the second has waited" in await said_with("a step", capsys)


async def test_a_request_that_is_worked_on_waits_for_nothing(server, answer, capsys) -> None:
    server.on("GET", "/health", answer(200, {"engine": "ready"}))
    with waiting.waiting_for(server.url, None).call("a request"):
        await server_was_asked(server)
    assert capsys.readouterr().err == ""


STARTING = {"engine": "starting", "waits_for": "the engine, which is starting."}
START_LINES = [
    {"number": number, "seconds": seconds, "text": text}
    for number, seconds, text in (
        (4, 0.2, "base model art/tiny: 0.0094 GB of weights"),
        (5, 0.3, "trainer: starts and loads the base model"),
        (6, 9.0, "engine: vLLM starts"),
        (7, 31.0, "engine: vLLM answers"),
    )
]


@pytest.mark.parametrize("name", ["registering 'a'", None])
async def test_a_start_is_a_line_for_each_of_its_parts(server, answer, capsys, name) -> None:
    with waiting.waiting_for(server.url, None).call(name):
        for number in range(1, len(START_LINES) + 1):
            server.on("GET", "/health", answer(200, {**STARTING, "progress": START_LINES[:number]}))
            await server_was_asked(server)
        server.on("GET", "/health", answer(200, {"engine": "ready", "progress": START_LINES}))
        told = (await said_with("the engine is ready", capsys)).splitlines()
    begun = [int(line.split()[1]) for line in told]  # a busy machine adds seconds
    assert all(seconds >= least for seconds, least in zip(begun, (0, 9, 31), strict=True))
    assert [line.split("  ")[1] for line in told] == [
        "base model art/tiny: 0.0094 GB of weights",
        "engine: vLLM starts",
        "the engine is ready",
    ]


async def test_a_long_part_of_a_start_is_said_again(server, answer, capsys, monkeypatch) -> None:
    monkeypatch.setattr(bars, "AGAIN_SECONDS", 0.2)
    server.on("GET", "/health", answer(200, {**STARTING, "progress": START_LINES[:1]}))
    with waiting.waiting_for(server.url, None).call("registering 'a'"):
        await said_with("0.0094 GB of weights", capsys, times=2)


async def test_a_call_without_a_name_waits_for_the_start_only(server, answer, capsys) -> None:
    server.on("GET", "/health", answer(200, {"engine": "ready", "waits_for": "a step of 'p/b', which trains"}))
    with waiting.waiting_for(server.url, None).call(None):
        await server_was_asked(server)
    assert capsys.readouterr().err == ""


async def test_an_earlier_start_is_not_reported(server, answer, capsys) -> None:
    line = {"number": 9, "seconds": 40.0, "text": "engine: ready"}
    server.on("GET", "/health", answer(200, {"engine": "ready", "progress": [line]}))
    with waiting.waiting_for(server.url, None).call("a request"):
        await server_was_asked(server)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["a request", None])
async def test_a_restart_of_the_server_is_said(server, answer, capsys, name) -> None:
    ready = {"number": 9, "seconds": 153.0, "text": "engine: ready"}
    server.on("GET", "/health", answer(200, {"engine": "ready", "progress": [ready]}))
    with waiting.waiting_for(server.url, None).call(name):
        await server_was_asked(server)
        await server.stop()
        told = await said_with("does not answer", capsys)
        await server.start()
        server.on("GET", "/health", answer(200, STARTING))
        told += await said_with("the server was restarted; its engine starts", capsys)
        server.on("GET", "/health", answer(200, {**STARTING, "progress": START_LINES[:1]}))
        told += await said_with("0.0094 GB", capsys)
        server.on("GET", "/health", answer(200, {"engine": "ready", "progress": START_LINES}))
        told += await said_with("art: 31 s  the engine is ready", capsys)
    away = {"a request": "for the server at", None: "art: the server at"}[name]
    assert told.startswith("art: ") and away in told.splitlines()[0] and "engine: ready" not in told
    assert told.count("does not answer") == 1


async def test_a_server_that_does_not_answer_is_named(capsys) -> None:
    with waiting.waiting_for("http://127.0.0.1:9", None).call("a request"):
        await said_with("for the server at http://127.0.0.1:9, which does not answer", capsys)


async def test_what_a_job_waits_for_is_said_and_events_go_on_behind_the_last(
    server, answer, model, groups, capsys
) -> None:
    accepted = {"event": "accepted", "job_id": "j1"}
    waits = {"event": "waiting", "job_id": "j1", "number": 7, "waits_for": "2 earlier jobs, of p/b"}
    done = {"event": "done", "job_id": "j1", "step": 1, "metrics": {}}

    def slowly():
        yield accepted
        yield waits

    server.on("POST", "/api/models/demo/agent/train", answer(lines=slowly(), hang_up=True))
    server.on("GET", "/api/jobs/j1/events?after=7", answer(lines=[waits, done]))
    result = await model.train(groups, expected_step=0)
    assert result.step == 1
    (request,) = server.sent("POST", "/api/models/demo/agent/train")
    assert request.json()["expected_step"] == 0
    assert "art: job j1 has waited" in capsys.readouterr().err


async def test_a_moved_step_is_refused(server, answer, model, groups) -> None:
    error = {"message": "the model is at step 3", "code": "step_moved"}
    server.on("POST", "/api/models/demo/agent/train", answer(409, {"error": error}))
    with pytest.raises(art.ArtStatusError) as refused:
        await model.train(groups, expected_step=2)
    assert refused.value.code == "step_moved"
