"""The distributions that tokens were sampled from, on real vLLM: the ledger's records against transformers' logits."""

import sqlite3
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from art_server.ledger.records import Record
from art_server.shared.kept_set import unpack_set
from art_server.store.base_models import TINY_DIR
from tests.engine.integration.answers import WEATHER_TOOL, records_of, sse_data
from tests.live import Server, chat, register
from tests.sampling import SAMPLING

STRICT_TOOL = {**WEATHER_TOOL, "function": {**WEATHER_TOOL["function"], "strict": True}}
STRICT_TOOLS = {
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "tools": [STRICT_TOOL],
    "tool_choice": "required",
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "rain": {"type": "boolean"}},
    "required": ["city", "rain"],
}
JSON_SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}}
CASES: dict[str, dict[str, Any]] = {
    **{case: sampling for case, sampling in SAMPLING.items() if not {"tools", "response_format"} & sampling.keys()},
    "strict tools": STRICT_TOOLS,
    "JSON schema": JSON_SCHEMA,
    "bias": {"logit_bias": {"5": 3.0, "300": -100.0}},
    "min_tokens": {"min_tokens": 4},
    "bad words": {"bad_words": ["yes", "no"]},
    "allowed": {"allowed_token_ids": list(range(40, 700))},
    "joined": {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "min_p": 0.01, **JSON_SCHEMA},
}
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def model(server: Server) -> str:
    return register(server, "kept")["inference_name"]


@pytest.fixture(scope="module")
def scorer() -> Any:
    with warnings.catch_warnings(action="ignore"):
        return AutoModelForCausalLM.from_pretrained(TINY_DIR, dtype=torch.float32).eval()


def check(record: Record, scorer: Any) -> int:
    """Checks each token's log-probability under its recorded distribution; returns how many tokens have a set."""
    whole = torch.tensor([record.prompt_token_ids + record.token_ids])
    with torch.no_grad():
        logits_TV = scorer(whole).logits[0, len(record.prompt_token_ids) - 1 : -1].double()
    assert record.sampled_logprobs is not None
    assert len(record.sampled_logprobs) == len(record.token_ids) == len(record.logprobs)
    kept = record.kept or [-1] * len(record.token_ids)
    for logits_V, token, number, raw, sampled in zip(
        logits_TV, record.token_ids, kept, record.logprobs, record.sampled_logprobs, strict=True
    ):
        assert raw == pytest.approx(float(logits_V.log_softmax(0)[token]), abs=TOLERANCE)
        for biased, bias in (record.sampling["logit_bias"] or {}).items():
            logits_V[int(biased)] += bias
        is_kept = torch.ones(len(logits_V), dtype=torch.bool)
        if number >= 0:
            ids = unpack_set(record.sets[number])
            assert token in ids
            is_kept[:] = False
            is_kept[ids] = True
        scaled = (logits_V / record.sampling["temperature"]).masked_fill(~is_kept, -torch.inf)
        assert sampled == pytest.approx(float(scaled.log_softmax(0)[token]), abs=TOLERANCE)
    return sum(number >= 0 for number in kept)


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_scored_as_they_were_sampled(server: Server, model: str, scorer: Any, name: str) -> None:
    asked = {"n": 2, "max_tokens": 24, "logprobs": True, **CASES[name]}
    with server.client() as client:
        body = chat(client, model, **asked)
    records = records_of(server, body["id"].removeprefix("chatcmpl-"))
    assert len(records) == 2
    with_sets = [check(record, scorer) for record in records]
    is_cut = bool(CASES[name].keys() - {"temperature", "logit_bias"})
    assert all(with_sets) == is_cut
    for record, choice in zip(records, body["choices"], strict=True):
        if name == "plain":
            assert record.sampled_logprobs == record.logprobs
        if choice["logprobs"] is not None:  # the client gets raw log-probabilities
            said = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            assert said == pytest.approx(record.logprobs, abs=1e-6)
        for packed in record.sets:
            assert len(packed) <= 1 + min(4 * len(unpack_set(packed)), 1408 // 8)


def test_plain_completions_keep_to_their_structure(server: Server, model: str, scorer: Any) -> None:
    """vLLM applies the structure after the end of thinking, which a prompt without a chat never has."""
    choices = ["hello", "bye"]
    body = {"model": model, "prompt": "Say", "n": 4, "structured_outputs": {"choice": choices}}
    with server.client() as client:
        answer = client.post("/v1/completions", json=body).json()
    assert {choice["text"] for choice in answer["choices"]} <= set(choices)
    records = records_of(server, answer["id"].removeprefix("cmpl-"))
    assert all(check(record, scorer) for record in records)


def test_streams_and_stop_strings_keep_a_figure_for_each_token(server: Server, model: str, scorer: Any) -> None:
    for more in ({"top_p": 0.8}, JSON_SCHEMA, {"top_k": 20, "stop": ["e"]}):
        body = {"model": model, "stream": True, "n": 2, "max_tokens": 24, **more}
        body["messages"] = [{"role": "user", "content": "respond with yes, no, maybe"}]
        with server.client() as client:
            response = client.post("/v1/chat/completions", json=body)
        request_id = sse_data(response.text)[0]["id"].removeprefix("chatcmpl-")
        records = records_of(server, request_id)
        assert len(records) == 2
        assert all(check(record, scorer) for record in records)


def test_many_kinds_of_requests_in_one_batch(server: Server, model: str, scorer: Any) -> None:
    def ask(name: str) -> str:
        with server.client() as client:
            return chat(client, model, max_tokens=32, **CASES[name])["id"]

    with ThreadPoolExecutor(32) as pool:
        names = [*CASES] * 3
        ids = list(pool.map(ask, names))
    for name, request_id in zip(names, ids, strict=True):
        (record,) = records_of(server, request_id.removeprefix("chatcmpl-"))
        num_sets = check(record, scorer)
        assert bool(num_sets) == bool(CASES[name].keys() - {"temperature", "logit_bias"})


def test_greedy_and_penalised_choices_have_no_sampled_logprobs(server: Server, model: str) -> None:
    for more in ({"temperature": 0}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.1}):
        with server.client() as client:
            body = chat(client, model, **more)
        (record,) = records_of(server, body["id"].removeprefix("chatcmpl-"))
        assert record.sampled_logprobs is None and record.sets == []
        assert all(np.isfinite(record.logprobs))


def test_bytes_a_token(server: Server, model: str) -> None:
    """At most 16 with a grammar, because each of its sets is stored once; with top_p, 4 per kept id and 8 more."""
    file = server.path / "art" / ".server" / "ledger.sqlite"

    def stored() -> float:
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as db:
            (records,) = db.execute("SELECT TOTAL(LENGTH(sampled_from)) FROM records").fetchone()
            (sets,) = db.execute("SELECT TOTAL(LENGTH(packed) + 48) FROM kept_sets").fetchone()
        return records + sets

    def bytes_a_token(requests: int, **asked: Any) -> tuple[float, float]:
        before, num_tokens, num_ids = stored(), 0, 0
        with server.client() as client, ThreadPoolExecutor(requests) as pool:
            bodies = [*pool.map(lambda _: chat(client, model, n=8, **asked), range(requests))]
        for body in bodies:
            for record in records_of(server, body["id"].removeprefix("chatcmpl-")):
                num_tokens += len(record.token_ids)
                num_ids += sum(len(unpack_set(record.sets[i])) for i in record.kept if i >= 0)
        return (stored() - before) / num_tokens, num_ids / num_tokens

    of_grammar, _ = bytes_a_token(20, max_tokens=48, **JSON_SCHEMA)
    assert of_grammar <= 16
    of_top_p, ids = bytes_a_token(8, max_tokens=48, ignore_eos=True, top_p=0.8)
    assert of_top_p <= 4 * ids + 8
