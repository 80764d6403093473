"""Exact tokens on real vLLM: the trained tokens are the sampled ones, with every API and every kind of agent."""

import itertools
import json
from typing import Any, cast

import httpx
import openai
import pytest

from art_protocol.wire import NOT_DELIVERED
from art_server.ledger import conversation
from art_server.ledger.sessions import ASKED_AGAIN
from tests.engine.integration.answers import (
    TOKENIZER,
    WEATHER_TOOL,
    ask,
    has_one_whole_call,
    post,
    records_of,
    session_records,
    sse_data,
)
from tests.live import PROJECT, Server, register, train
from tests.waiting import PATIENCE_SECONDS, wait_until

QUESTION = {"role": "user", "content": "respond with yes, no, maybe"}


@pytest.fixture(scope="module")
def model(server: Server) -> str:
    return register(server, "exact")["inference_name"]


def session_of(server: Server, session: str, name: str = "exact") -> dict[str, Any]:
    with server.client() as client:
        return client.get(f"/api/models/{PROJECT}/{name}/sessions/{session}").json()


def letters(text: str) -> list[int]:
    """The single-letter tokens of a text: a spelling that the tokenizer would not choose."""
    return [cast(int, TOKENIZER.token_to_id(letter)) for letter in text]  # each letter is a token


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["chat", "messages", "responses", "completions"])
def test_later_turns_begin_with_the_exact_earlier_ones(server: Server, model: str, api: str, stream: bool) -> None:
    session = f"turns-{api}-{stream}"
    turns: list[Any] = ["once upon"] if api == "completions" else []
    said = [ask(server, api, model, turns, stream, session) for _ in range(3)]
    records = session_records(server, session)
    assert len(records) == 3
    for record, text in zip(records, said, strict=True):
        assert len(record.token_ids) == len(record.logprobs)
        decoded = TOKENIZER.decode(record.token_ids, skip_special_tokens=True)
        assert "".join(decoded.split()) == "".join(text.split())
    if api != "completions":  # a completion has no turns: its prompt is one text
        for earlier, later in itertools.pairwise(records):
            past = earlier.prompt_token_ids + earlier.token_ids
            assert later.link in ("exact", "spliced")
            assert later.prompt_token_ids[: len(past)] == past


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_response_is_continued_by_its_exact_tokens(server: Server, model: str, stream: bool) -> None:
    """A tool's result, and then a question, each with nothing but the id of the response before it."""
    session = f"named-{stream}"
    function = WEATHER_TOOL["function"] | {"type": "function"}
    body = {"model": model, "tools": [function], "max_output_tokens": 64, "temperature": 0.3, "stream": stream}
    calls: list[dict[str, Any]] = []
    first: dict[str, Any] = {}
    with server.client() as client:
        for seed in range(32):  # the tiny model does not call with each of them
            question = {"input": "What is the weather in Paris?", "seed": seed}
            response = client.post("/v1/responses", json=body | question)
            assert response.status_code == 200, response.text
            first = sse_data(response.text)[-1]["response"] if stream else response.json()
            calls = [item for item in first["output"] if item["type"] == "function_call"]
            if len(calls) == 1:
                break
    (call,) = calls
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    second = post(server, "responses", body | {"input": [result], "previous_response_id": first["id"]}, session)
    assert second["previous_response_id"] == first["id"]
    post(server, "responses", body | {"input": "and now?", "previous_response_id": second["id"]}, session)
    records = [records_of(server, first["id"].removeprefix("resp_"))[0], *session_records(server, session)]
    assert len(records) == 3
    rendered = TOKENIZER.decode(records[1].prompt_token_ids, skip_special_tokens=False)
    assert rendered.count("What is the weather in Paris?") == 1 and "sunny" in rendered
    past = records[1].prompt_token_ids + records[1].token_ids
    assert records[2].link in ("exact", "spliced") and records[2].prompt_token_ids[: len(past)] == past


def test_an_answer_in_json_that_the_agent_parses_is_continued(server: Server, model: str) -> None:
    written = '{ "a" : 1 }'
    body = {"model": model, "messages": [QUESTION], "structured_outputs": {"choice": [written]}, "max_tokens": 64}
    said = post(server, "chat", body, "json")["choices"][0]["message"]["content"]
    assert said == written
    compact = json.dumps(json.loads(said), separators=(",", ":"))
    messages = [QUESTION, {"role": "assistant", "content": compact}, QUESTION]
    post(server, "chat", {"model": model, "messages": messages, "max_tokens": 4}, "json")
    first, second = session_records(server, "json")
    past = first.prompt_token_ids + first.token_ids
    assert second.link == "spliced" and second.prompt_token_ids[: len(past)] == past


def test_an_unusual_spelling_is_sampled_from_and_trained(server: Server, model: str) -> None:
    """Re-rendering "maybe" would change its tokens; with splicing nothing changes."""
    spelling = letters("maybe")
    assert TOKENIZER.encode("maybe", add_special_tokens=False).ids != spelling
    with server.client() as client:
        groups = []
        for reward in (0.0, 1.0):
            body = {
                "model": model,
                "messages": [QUESTION],
                "max_tokens": 5,
                "allowed_token_ids": spelling,
            }
            first = client.post("/v1/chat/completions", json=body | {"logprobs": True}).json()
            choice = first["choices"][0]
            assert len(choice["token_ids"]) == 5 and set(choice["token_ids"]) <= set(spelling)
            message = {"role": "assistant", "content": choice["message"]["content"]}
            more = {"model": model, "messages": [QUESTION, message, QUESTION], "max_tokens": 4}
            more |= {"return_token_ids": True}
            second = client.post("/v1/chat/completions", json=more).json()
            past = first["prompt_token_ids"] + choice["token_ids"]
            assert second["prompt_token_ids"][: len(past)] == past
            entries = [QUESTION, choice, QUESTION, second["choices"][0]]
            groups.append({"messages_and_choices": entries, "reward": reward})
        report = train(client, "exact", [{"trajectories": groups}])[-1]["report"]
    assert report["continuations"] == {"joined": 2} and report["num_rows"] == 2
    assert report["turns"] == {"ledger": 4}


def test_tool_calls_are_captured_as_they_were_written(server: Server, model: str) -> None:
    """Whole and streamed: the parsed call equals the recorded tokens, and the next turn continues from these tokens."""
    tools = [WEATHER_TOOL]
    for stream in (False, True):
        session = f"tools-{stream}"
        with server.client(headers={"x-art-session": session}) as client:
            messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]
            body = {"model": model, "messages": messages, "tools": tools, "max_tokens": 64}
            body["temperature"] = 0.3
            message: dict[str, Any] = {}
            for seed in range(32):  # the tiny model does not call with each of them
                response = client.post("/v1/chat/completions", json=body | {"stream": stream, "seed": seed})
                message = streamed_message(response) if stream else response.json()["choices"][0]["message"]
                if has_one_whole_call(message):
                    break
            (call,) = message["tool_calls"]
            answer = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
            said = {"role": "assistant", "content": None, "tool_calls": message["tool_calls"]}
            client.post("/v1/chat/completions", json=body | {"messages": [*messages, said, answer]})
        *_, called, answered = session_records(server, session)
        text = TOKENIZER.decode(called.token_ids, skip_special_tokens=False).removesuffix("<|im_end|>")
        assert conversation.text_digest(text) == conversation.message_digest(said)
        past = called.prompt_token_ids + called.token_ids
        assert answered.prompt_token_ids[: len(past)] == past
        reply = session_of(server, session)
        assert reply["num_choices"] == 2
        assert [("finish_reason" in e) for e in reply["histories"][0]["messages_and_choices"]] == [
            False,
            True,
            False,
            True,
        ]


def streamed_message(response: httpx.Response) -> dict[str, Any]:
    """The message assembled from the deltas of a chat stream."""
    content, calls = "", {}
    for chunk in sse_data(response.text):
        for choice in chunk["choices"]:
            content += choice["delta"].get("content") or ""
            for part in choice["delta"].get("tool_calls") or ():
                call = calls.setdefault(part["index"], {"type": "function", "function": {"arguments": ""}})
                function = part.get("function") or {}
                call["id"] = part.get("id") or call.get("id")
                call["function"]["name"] = function.get("name") or call["function"].get("name")
                call["function"]["arguments"] += function.get("arguments") or ""
    return {"content": content, "tool_calls": list(calls.values())}


def test_thinking_is_kept_apart_and_its_loss_is_counted(server: Server, model: str) -> None:
    with server.client(headers={"x-art-session": "thinking"}) as client:
        messages: list[dict[str, Any]] = []
        choices = []
        for _ in range(2):
            messages.append(QUESTION)
            body = {"model": model, "messages": messages, "max_tokens": 120}
            body["chat_template_kwargs"] = {"enable_thinking": True}
            choice: dict[str, Any] = {}
            for seed in range(32):  # with some of them it thinks to the end
                choice = client.post("/v1/chat/completions", json=body | {"seed": seed}).json()["choices"][0]
                if choice["finish_reason"] == "stop" and choice["message"]["content"]:
                    break
            choices.append(choice)
            assert choice["message"].get("reasoning")
            messages = [*messages, {"role": "assistant", "content": choice["message"]["content"]}]
        entries = [QUESTION, choices[0], QUESTION, choices[1]]
        other = [QUESTION, choices[1]]
        group = {
            "trajectories": [
                {"messages_and_choices": entries, "reward": 1.0},
                {"messages_and_choices": other, "reward": 0.0},
            ]
        }
        report = train(client, "exact", [group])[-1]["report"]
    assert report["continuations"] == {"dropped": 1}
    assert report["num_rows"] == 3


def test_agents_that_keep_only_text_are_trained_on_exact_tokens(server: Server) -> None:
    """Many short answers in a group are equal: each trajectory gets its own sample."""
    register(server, "text-only")
    with server.client() as client:
        body = {"model": f"{PROJECT}/text-only", "messages": [QUESTION], "max_tokens": 6, "n": 16}
        answer = client.post("/v1/chat/completions", json=body | {"logprobs": True}).json()

        def bare(choice: dict[str, Any], with_logprobs: bool) -> dict[str, Any]:
            message = {"role": "assistant", "content": choice["message"]["content"]}
            bare_choice = {"index": 0, "finish_reason": "stop", "message": message}
            return bare_choice | ({"logprobs": choice["logprobs"]} if with_logprobs else {})

        for with_logprobs in (False, True):
            group = {
                "trajectories": [
                    {"messages_and_choices": [QUESTION, bare(c, with_logprobs)], "reward": float(i)}
                    for i, c in enumerate(answer["choices"])
                ]
            }
            done = train(client, "text-only", [group], learning_rate=1e-6)[-1]
            assert done["report"]["turns"] == {"ledger": 16}
            tokens = sum(len(choice["token_ids"]) for choice in answer["choices"])
            assert done["report"]["num_trained_tokens"] == tokens


@pytest.mark.parametrize("temperature", [0.01, 2.0], ids=["equal answers", "any answers"])
def test_choices_that_nothing_continues_are_left_out_and_counted(
    server: Server, model: str, temperature: float
) -> None:
    session = f"branches-{temperature:.0f}"
    with server.client(headers={"authorization": f"Bearer any::{session}"}) as client:
        body = {"model": model, "messages": [QUESTION], "max_tokens": 6, "temperature": temperature}
        first = client.post("/v1/chat/completions", json=body | {"n": 2}).json()
        taken = first["choices"][0]["message"]["content"]
        messages = [QUESTION, {"role": "assistant", "content": taken}, QUESTION]
        client.post("/v1/chat/completions", json=body | {"messages": messages})
    reply = session_of(server, session)
    assert reply["num_choices"] == 2 and len(reply["histories"]) == 1
    reason = "the agent continued with another answer to the same conversation"
    assert reply["unused"] == {reason: 1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shows_error", [False, True], ids=["as LangChain", "as instructor"])
def test_of_retries_of_the_last_turn_the_used_answer_is_trained(
    server: Server, model: str, shows_error: bool, stream: bool
) -> None:
    """LangChain's `with_retry` sends the same messages again. instructor adds the bad answer and its error."""
    session = f"retries-{shows_error}-{stream}"
    client = openai.OpenAI(base_url=f"{server.url}/s/{session}/v1", api_key="none")

    def ask(messages: list[Any]) -> str:
        """The answer's text; sent once, so that each request of the session is one of the agent's."""
        asked: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": 6}
        if not stream:
            completion = client.chat.completions.create(**asked)
            return completion.choices[0].message.content
        chunks = client.chat.completions.create(**asked, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    messages: list[Any] = [QUESTION, {"role": "assistant", "content": ask([QUESTION])}, QUESTION]
    heard: list[str] = []
    for attempt in range(3):
        heard.append(ask(messages))
        if shows_error and attempt < 2:
            messages += [
                {"role": "assistant", "content": heard[-1]},
                {"role": "user", "content": f"1 validation error: {heard[-1]!r} is no JSON"},
            ]
    reply = session_of(server, session)
    (history,) = reply["histories"]
    trained = [e["message"]["content"] for e in history["messages_and_choices"] if "art" in e]
    if shows_error:  # the policy reads its bad answers, which are turns of its conversation
        assert trained[1:] == heard and reply["unused"] == {}
    else:
        assert trained[1:] == heard[-1:] and reply["unused"] == {ASKED_AGAIN: 2}


def test_a_client_that_hangs_up_leaves_nothing_to_train(server: Server, model: str) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "Repeat: one two three"}]}
    body |= {"max_tokens": 800, "ignore_eos": True}
    headers, hangs_up = {"x-art-session": "gone"}, httpx.Timeout(PATIENCE_SECONDS, read=0.3)
    with (
        server.client(headers=headers) as client,
        client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response,
    ):
        next(response.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=hangs_up)
    with server.client(headers=headers) as client:
        kept = client.post("/v1/chat/completions", json=body | {"max_tokens": 4}).json()
        wait_until(lambda: "\nart_requests_running 0" in client.get("/metrics").text)
    reply = session_of(server, "gone")
    assert (reply["num_choices"], reply["unused"]) == (1, {NOT_DELIVERED: 2})
    entries = reply["histories"][0]["messages_and_choices"]
    assert entries[-1]["art"]["id"] == kept["choices"][0]["art"]["id"]


def test_two_policies_in_one_session_are_captured_apart(server: Server) -> None:
    """Self-play: each model's conversation contains its own choices, and the other model's answers as messages."""
    for name in ("player-x", "player-o"):
        register(server, name)
    boards = {"player-x": [QUESTION], "player-o": [QUESTION]}
    with server.client(headers={"x-art-session": "game"}) as client:
        for turn in range(4):
            me, other = ("player-x", "player-o") if turn % 2 == 0 else ("player-o", "player-x")
            body = {"model": f"{PROJECT}/{me}", "messages": boards[me], "max_tokens": 6}
            answer = client.post("/v1/chat/completions", json=body).json()
            assert "choices" in answer, answer
            said = answer["choices"][0]["message"]["content"] or ""  # it may have thought only
            boards[me] = [*boards[me], {"role": "assistant", "content": said}]
            boards[other] = [*boards[other], {"role": "user", "content": said}]
    for name in boards:
        reply = session_of(server, "game", name)
        assert reply["num_choices"] == 2 and len(reply["histories"]) == 1
        marks = [e["art"]["model"] for e in reply["histories"][0]["messages_and_choices"] if "art" in e]
        assert marks == [f"{PROJECT}/{name}"] * 2


def test_what_was_never_sampled_trains_only_on_request(server: Server) -> None:
    register(server, "offline")
    words = ["yes", "no", "maybe", "perhaps"]
    group = {
        "trajectories": [
            {
                "messages_and_choices": [QUESTION, {"role": "assistant", "content": word}],
                "reward": float(i),
            }
            for i, word in enumerate(words)
        ]
    }
    url = f"/api/models/{PROJECT}/offline/train"
    with server.client() as client:
        refused = client.post(url, json={"groups": [group]})
        assert refused.status_code == 422
        config = {"allow_training_without_logprobs": True, "learning_rate": 1e-4}
        lines = client.post(url, json={"groups": [group], "config": config}).text.splitlines()
    done = json.loads(lines[-1])
    assert done["event"] == "done", done
    assert done["report"]["turns"] == {"recomputed": 4}
    assert done["metrics"]["loss/importance_ratio_mean"] == pytest.approx(1.0)
