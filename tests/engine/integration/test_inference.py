"""The four APIs through the proxy: what clients get, and what the ledger stores."""

import concurrent.futures
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from art_server.engine.command import SOCKET_NAME
from art_server.ledger.records import Record
from tests.engine.integration.answers import WEATHER_TOOL, number_of, records_of, sse_data
from tests.live import PROJECT, Server, chat, register, train_one_step


@pytest.fixture(scope="module")
def model(server: Server) -> str:
    return register(server, "inference")["inference_name"]


def newest_record(server: Server, api: str) -> Record:
    file = server.path / "art" / ".server" / "ledger.sqlite"
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as db:
        query = "SELECT request_id FROM records WHERE api = ? ORDER BY created_at DESC LIMIT 1"
        (request_id,) = db.execute(query, (api,)).fetchone()
    return records_of(server, request_id)[0]


def check_record(record: Record) -> None:
    assert len(record.token_ids) == len(record.logprobs) > 0
    assert len(record.prompt_token_ids) > 0
    assert all(value <= 1e-3 for value in record.logprobs)


def test_events_pass_none_of_the_middleware_of_vllm(server: Server, model: str) -> None:
    note = (server.path / "art" / ".server" / "run_dir").read_text()
    run_dir = Path(note.splitlines()[0])
    transport = httpx.HTTPTransport(uds=str(run_dir / SOCKET_NAME))
    with httpx.Client(transport=transport, base_url="http://engine") as engine:
        answer = engine.get("/health", headers={"origin": "http://elsewhere"})
    assert answer.status_code == 200
    assert "vary" not in answer.headers  # its CORS middleware puts it there


def test_chat_choices_agree_with_the_ledger(server: Server, model: str) -> None:
    with server.client() as client:
        body = chat(client, model, n=2, logprobs=True)
    assert body["model"] == model
    request_id = body["id"].removeprefix("chatcmpl-")
    records = records_of(server, request_id)
    assert [r.choice_id for r in records] == [f"{request_id}-0", f"{request_id}-1"]
    for choice, record in zip(body["choices"], records, strict=True):
        check_record(record)
        mark = {"id": record.choice_id, "step": 0, "model": model}
        assert choice["art"] == mark | {"num_tokens": len(record.token_ids)}
        assert choice["token_ids"] == record.token_ids
        assert body["prompt_token_ids"] == record.prompt_token_ids
        said = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert said == pytest.approx(record.logprobs, abs=1e-6)
        assert (record.request.owner, record.request.model) == (PROJECT, number_of(server, "inference"))


def test_tokens_stay_hidden_unless_asked_for(server: Server, model: str) -> None:
    with server.client() as client:
        body = chat(client, model)
        asked = chat(client, model, return_token_ids=True)
    (choice,) = body["choices"]
    assert choice["logprobs"] is None
    assert not choice.get("token_ids") and not body.get("prompt_token_ids")
    (record,) = records_of(server, choice["art"]["id"].removesuffix("-0"))
    assert choice["art"]["num_tokens"] == len(record.token_ids)
    (choice,) = asked["choices"]
    (record,) = records_of(server, choice["art"]["id"].removesuffix("-0"))
    assert (choice["token_ids"], choice["logprobs"]) == (record.token_ids, None)
    assert asked["prompt_token_ids"] == record.prompt_token_ids


def test_chat_with_tools_records_every_token(server: Server, model: str) -> None:
    with server.client() as client:
        body = chat(
            client,
            model,
            messages=[{"role": "user", "content": "What is the weather in Paris?"}],
            tools=[WEATHER_TOOL],
            max_tokens=64,
            logprobs=True,
        )
    (record,) = records_of(server, body["id"].removeprefix("chatcmpl-"))
    check_record(record)
    assert len(body["choices"][0]["logprobs"]["content"]) == len(record.token_ids)


def test_chat_stream_ends_with_the_mark_of_its_record(server: Server, model: str) -> None:
    with server.client() as client:
        body = {"model": model, "messages": [{"role": "user", "content": "respond with yes, no, maybe"}]}
        body |= {"stream": True, "n": 2, "max_tokens": 8, "logprobs": True}
        response = client.post("/v1/chat/completions", json=body)
    assert response.headers["x-art-step"] == "0"
    chunks = sse_data(response.text)
    assert all(chunk["model"] == model for chunk in chunks)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    marks = [choice["art"]["id"] for choice in choices if "art" in choice]
    records = records_of(server, chunks[0]["id"].removeprefix("chatcmpl-"))
    assert sorted(marks) == [record.choice_id for record in records]
    for index, record in enumerate(records):
        check_record(record)
        said: list[float] = []
        for choice in choices:
            if choice["index"] == index and choice.get("logprobs"):
                said += [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert said == pytest.approx(record.logprobs, abs=1e-6)


@pytest.mark.parametrize("stream", [False, True])
def test_completions_leave_a_record(server: Server, model: str, stream: bool) -> None:
    with server.client() as client:
        body = {"model": model, "prompt": ["one two", "three"], "max_tokens": 5, "n": 2, "logprobs": 1}
        response = client.post("/v1/completions", json=body | {"stream": stream})
    assert response.status_code == 200, response.text
    bodies = sse_data(response.text) if stream else [response.json()]
    records = {r.choice_id: r for r in records_of(server, bodies[0]["id"].removeprefix("cmpl-"))}
    assert len(records) == 4
    choices = [choice for body in bodies for choice in body["choices"]]
    marked = [choice for choice in choices if "art" in choice]
    assert {choice["art"]["id"] for choice in marked} == set(records)
    for choice in marked:
        record = records[choice["art"]["id"]]
        check_record(record)
        said: list[float] = []
        for part in choices:
            if part["index"] == choice["index"] and part["logprobs"]:
                said += part["logprobs"]["token_logprobs"]
        assert said == pytest.approx(record.logprobs, abs=1e-6)


@pytest.mark.parametrize("stream", [False, True])
def test_responses_leave_a_record(server: Server, model: str, stream: bool) -> None:
    with server.client() as client:
        body = {"model": model, "input": "respond with yes, no, maybe", "max_output_tokens": 8}
        response = client.post("/v1/responses", json=body | {"stream": stream})
    assert response.status_code == 200, response.text
    answer = sse_data(response.text)[-1]["response"] if stream else response.json()
    assert answer["model"] == model
    record = newest_record(server, "responses")
    check_record(record)
    assert answer["id"] == f"resp_{record.request.request_id}"
    assert answer["usage"]["output_tokens"] == len(record.token_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_messages_leave_a_record(server: Server, model: str, stream: bool) -> None:
    with server.client() as client:
        message = {"role": "user", "content": "respond with yes, no, maybe"}
        body = {"model": model, "max_tokens": 8, "messages": [message], "stream": stream}
        response = client.post("/v1/messages", json=body, headers={"anthropic-version": "2023-06-01"})
    assert response.status_code == 200, response.text
    events = sse_data(response.text) if stream else [response.json()]
    usage = events[-2]["usage"] if stream else events[0]["usage"]
    record = newest_record(server, "messages")
    check_record(record)
    assert usage["output_tokens"] == len(record.token_ids)


def test_a_plain_openai_client_sees_policies_change(server: Server) -> None:
    """A client without `art`, against the second port, before and after a step."""
    register(server, "changes")
    client = openai.OpenAI(base_url=f"{server.inference_url}/v1", api_key="default")

    def distribution(model: str) -> dict[str, float]:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "respond with yes, no, maybe"}],
            max_tokens=1,
            logprobs=True,
            top_logprobs=10,
            temperature=0,
        )
        assert answer.choices[0].logprobs and answer.choices[0].logprobs.content
        return {top.token: top.logprob for top in answer.choices[0].logprobs.content[0].top_logprobs}

    before = distribution("changes")
    assert train_one_step(server, "changes")["step"] == 1
    after = distribution("changes")
    assert max(abs(after.get(token, -99) - value) for token, value in before.items()) > 1e-3
    assert distribution("changes@0") == pytest.approx(before, abs=1e-4)
    assert distribution(f"{PROJECT}/changes@1") == pytest.approx(after, abs=1e-4)
    assert "changes" in {card.id for card in client.models.list()}
    assert client.models.retrieve(f"{PROJECT}/changes@1").id == f"{PROJECT}/changes@1"
    client.close()


def test_the_inference_port_serves_inference_only(server: Server) -> None:
    listed = httpx.get(f"{server.inference_url}/v1/models")
    assert listed.status_code == 200
    head = httpx.head(f"{server.inference_url}/v1/models")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == listed.headers["content-length"]
    assert httpx.get(f"{server.inference_url}/api/models").status_code == 404


def test_vllm_routes_that_control_it_are_not_reachable(server: Server) -> None:
    with server.client() as client:
        for path in ("/v1/load_lora_adapter", "/pause", "/sleep", "/collective_rpc", "/tokenize"):
            assert client.post(path, json={}).status_code == 404


def test_seeds_and_prompt_logprobs_beside_other_traffic_leave_the_engine_alive(server: Server) -> None:
    """Prompts that together exceed a batch are computed in parts, whose samples are thrown away."""
    register(server, "seeded")
    model = f"{PROJECT}/seeded"
    restarts = (server.path / "server.log").read_text().count("engine restarts")
    long = "one two three four five six seven eight nine ten " * 30

    def complete(number: int, **options: Any) -> dict[str, Any]:
        body = {"model": model if number % 2 else "art/tiny", "prompt": f"{number} {long}"}
        with server.client() as client:
            reply = client.post("/v1/completions", json=body | {"max_tokens": 12} | options)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]

    with concurrent.futures.ThreadPoolExecutor(24) as threads:
        seeded = [threads.submit(complete, number, seed=number) for number in range(24)]
        scored = [
            # Fewer tokens than there are requests in a batch.
            threads.submit(complete, number, prompt=f"{number} yes", prompt_logprobs=0)
            for number in range(24, 40)
        ]
        texts = [future.result()["text"] for future in seeded]
        assert all(future.result()["prompt_logprobs"] for future in scored)
        again = threads.map(lambda number: complete(number, seed=number)["text"], range(24))
        same = sum(text == other for text, other in zip(texts, again, strict=True))
    assert same >= 22, "a seed gives the same answer; rounding may change one"
    assert (server.path / "server.log").read_text().count("engine restarts") == restarts
