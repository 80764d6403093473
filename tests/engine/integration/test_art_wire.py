"""ART's own HTTP protocol with the real server, with the bodies that NVIDIA's plugin sends."""

import json
import resource
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.integration.answers import WEATHER_TOOL, has_one_whole_call
from tests.live import PROJECT, Server, find_process, train_one_step
from tests.makers.art_wire_bodies import train_body
from tests.waiting import PATIENCE_SECONDS, wait_until

QUESTION = {"role": "user", "content": "respond with yes, no, maybe"}


def model_body(name: str, **internal_config: Any) -> dict[str, Any]:
    config = {"init_args": None, "engine_args": None, "trainer_args": None} | internal_config
    return {
        "name": name,
        "project": PROJECT,
        "entity": None,
        "id": None,
        "run_id": None,
        "config": None,
        "trainable": True,
        "inference_api_key": None,
        "base_path": ".art",
        "inference_base_url": None,
        "inference_model_name": None,
        "report_metrics": None,
        "base_model": "art/tiny",
        "_internal_config": config,
    }


def wire(server: Server) -> httpx.Client:
    headers = {"user-agent": "python-httpx/0.28.1", "content-type": "application/json"}
    return server.client(headers=headers)


def prepared(server: Server, model: dict[str, Any]) -> str:
    """Registers a model as the plugin does; returns the base URL for inference."""
    with wire(server) as client:
        assert client.post("/register", json=model).status_code == 200
        body = {"model": model, "config": None}
        base_url, key = client.post("/_prepare_backend_for_training", json=body).json()
    assert key == "default"
    return base_url


def ask(base_url: str, name: str, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The first choice of a request with the model's bare name, which does not request log-probabilities."""
    body = {"messages": messages, "model": name, "max_tokens": 12, "stream": False, **more}
    headers = {"authorization": "Bearer default"}
    response = httpx.post(f"{base_url}/chat/completions", json=body, headers=headers, timeout=PATIENCE_SECONDS)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == name
    return response.json()["choices"][0]


def recorded(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice as the plugin rebuilds it: only content and log-probabilities of the answer."""
    message = {"content": choice["message"]["content"] or "", "refusal": None, "role": "assistant"}
    message |= {"annotations": None, "audio": None, "function_call": None, "tool_calls": None}
    logprobs = {"content": choice["logprobs"]["content"], "refusal": None}
    return {"finish_reason": "stop", "index": 0, "logprobs": logprobs, "message": message}


def answered_at_once(base_url: str, name: str, number: int, **more: Any) -> list[list[dict[str, Any]]]:
    """Episodes of one turn, whose requests are in one batch."""
    with ThreadPoolExecutor(number) as pool:
        choices = [*pool.map(lambda _: ask(base_url, name, [QUESTION], **more), range(number))]
    return [[QUESTION, recorded(choice)] for choice in choices]


def train(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of a train call, read as ART's clients read them."""
    with wire(server) as client, client.stream("POST", "/_train_model", json=body) as response:
        assert response.status_code == 200
        return [json.loads(line) for line in response.iter_lines()]


def get_step(server: Server, model: dict[str, Any]) -> int:
    with wire(server) as client:
        return client.post("/_get_step", json=model).json()


def newest_report(server: Server, name: str) -> dict[str, Any]:
    file = server.path / "art" / ".server" / "server.sqlite"
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as db:
        query = "SELECT report FROM jobs JOIN models USING (model) WHERE name = ? ORDER BY number DESC LIMIT 1"
        return json.loads(db.execute(query, (name,)).fetchone()[0])


def test_the_plugins_round_from_register_to_the_second_step(server: Server) -> None:
    trainer_args = {"learning_rate": 1e-3, "beta": 0.01, "obsolete": 1}
    model = model_body("nat-run", trainer_args=trainer_args)
    base_url = prepared(server, model)
    assert base_url == f"{server.inference_url}/v1"
    headers = {"authorization": "Bearer default"}
    assert httpx.get(f"{base_url}/models", headers=headers).status_code == 200
    for step in (1, 2):
        episodes = [[QUESTION, recorded(ask(base_url, "nat-run", [QUESTION], temperature=0.9))] for _ in range(4)]
        (row,) = train(server, train_body(model, *episodes))
        assert all(isinstance(value, float) for value in row.values())
        assert row["num_gradient_steps"] == row["data/step_num_gradient_steps"] == 1.0
        assert row["loss/learning_rate"] == pytest.approx(1e-3)
        assert get_step(server, model) == step
    report = newest_report(server, "nat-run")
    assert report["turns"] == {"ledger": 4} and report["config"]["beta"] == 0.01
    assert "trainer_args.obsolete has no effect here" in report["notes"]
    assert report["num_tokens_without_logprob"] == 0  # sampled and scored at temperature 0.9
    assert report["config"]["ratio_to"] == "sampled"
    with wire(server) as client:
        body = {"model": model, "steps_to_keep": [2]}
        assert client.post("/_delete_checkpoint_files", json=body).status_code == 200
    kept = [folder.name for folder in (server.model_dir("nat-run") / "checkpoints").iterdir()]
    assert kept == ["0002"]
    choice = ask(base_url, "nat-run", [QUESTION])
    assert choice["art"]["step"] == 2


def test_a_tool_episode_without_its_calls_trains_on_exact_tokens(server: Server) -> None:
    """The plugin drops tool calls and sends the tool's result as an assistant's message."""
    model = model_body("wire-tools")
    base_url = prepared(server, model)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]
    episodes: list[list[dict[str, Any]]] = []
    for seed in range(16):  # the tiny model does not call with each of them
        more = {"tools": [WEATHER_TOOL], "max_tokens": 64, "temperature": 0.3, "seed": seed}
        call = ask(base_url, "wire-tools", messages, **more)
        if not has_one_whole_call(call["message"]):
            continue
        said = {"role": "assistant", "tool_calls": call["message"]["tool_calls"], "content": None}
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "sunny"}
        answer = ask(base_url, "wire-tools", [*messages, said, result], **more)
        told = {"role": "assistant", "content": "sunny"}
        episodes.append([*messages, recorded(call), told, recorded(answer)])
        if len(episodes) == 2:
            break
    assert len(episodes) == 2 and episodes[0][1]["message"]["content"] == ""
    (row,) = train(server, train_body(model, *episodes))
    assert "error" not in row
    report = newest_report(server, "wire-tools")
    assert report["turns"] == {"ledger": 4} and report["continuations"] == {"joined": 2}
    assert report["dropped"] == []
    sampled = [len(e[k]["logprobs"]["content"]) for e in episodes for k in (1, 3)]
    assert report["num_trained_tokens"] == sum(sampled)


def test_a_client_that_hangs_up_ends_no_job(server: Server) -> None:
    model = model_body("nat-gone")
    base_url = prepared(server, model)
    episodes = answered_at_once(base_url, "nat-gone", 4, max_tokens=64, min_tokens=64)
    body = train_body(model, *episodes)
    with wire(server) as client, client.stream("POST", "/_train_model", json=body) as response:
        assert next(response.iter_raw()).strip() == b""
    wait_until(lambda: get_step(server, model) == 1)


def test_a_step_without_memory_says_what_to_lower(server: Server) -> None:
    """With a memory limit the trainer's step fails; without the limit the next step succeeds."""
    model = model_body("nat-memory")
    base_url = prepared(server, model)
    episodes = answered_at_once(base_url, "nat-memory", 2, max_tokens=400, min_tokens=400)
    train_one_step(server, "nat-memory")
    trainer = find_process(server, "art_server.trainer.worker")
    size = int(Path(f"/proc/{trainer}/statm").read_text().split()[0]) * resource.getpagesize()
    was = resource.prlimit(trainer, resource.RLIMIT_AS, (size, -1))
    try:
        (row,) = train(server, train_body(model, *episodes))
    finally:
        resource.prlimit(trainer, resource.RLIMIT_AS, was)
    assert "allocate" in row["error"] and "Lower init_args.max_seq_length" in row["error"]
    assert get_step(server, model) == 1
    (row,) = train(server, train_body(model, *episodes))
    assert "error" not in row and get_step(server, model) == 2


def test_streamed_answers_carry_log_probabilities_unasked(server: Server) -> None:
    base_url = prepared(server, model_body("nat-stream"))
    body = {"model": "nat-stream", "messages": [QUESTION], "max_tokens": 4, "stream": True}
    response = httpx.post(f"{base_url}/chat/completions", json=body, timeout=PATIENCE_SECONDS)
    assert '"logprob":' in response.text
