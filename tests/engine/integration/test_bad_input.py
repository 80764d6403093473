"""Errors for bad input name the wrong part and the remedy, and the server stores nothing of it."""

import json
import shutil
from typing import Any

import pytest

from art_server.jobs.reasons import CHANGED_IDS
from art_server.store.base_models import TINY_DIR
from tests.live import PROJECT, Server, register, sampled_group


def post(server: Server, path: str, body: Any, **options: Any) -> dict[str, Any]:
    with server.client() as client:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        response = client.post(path, content=content, headers=headers, **options)
    error = response.json()["error"]
    return error | {"status": response.status_code}


@pytest.mark.parametrize(
    ("field", "name"),
    [("project", "../up"), *(("name", name) for name in ("../up", ".hidden", "", "x" * 1_000_000, "a b", "a@1"))],
    ids=lambda text: text[:10],
)
def test_bad_names_are_refused_before_they_touch_a_path(server: Server, field: str, name: str) -> None:
    body = {"name": "fine", "project": PROJECT, "base_model": "art/tiny"} | {field: name}
    error = post(server, "/api/models", body)
    assert error["status"] == 422 and error["code"] == "bad_name" and error["param"] == field
    assert len(error["message"]) < 1000


def test_unknown_base_models_are_named(server: Server) -> None:
    for base_model in ("no/such-model", "/no/such/folder"):
        body = {"name": "x", "project": PROJECT, "base_model": base_model}
        error = post(server, "/api/models", body)
        assert error["status"] == 422 and error["code"] == "unknown_base_model"
        assert base_model in error["message"]
    assert not server.model_dir("x").exists()


def test_another_base_model_than_the_loaded_one_is_refused(server: Server, tmp_path: Any) -> None:
    shutil.copy(TINY_DIR / "config.json", tmp_path / "config.json")
    (tmp_path / "model.safetensors").write_bytes(b"other")
    body = {"name": "x", "project": PROJECT, "base_model": str(tmp_path)}
    error = post(server, "/api/models", body)
    assert error["status"] == 409 and error["code"] == "base_model_differs"
    assert "art/tiny" in error["message"]


def test_a_rank_above_the_engine_s_is_refused(server: Server) -> None:
    body = {"name": "x", "project": PROJECT, "base_model": "art/tiny", "lora": {"rank": 64}}
    error = post(server, "/api/models", body)
    assert error["status"] == 422 and error["param"] == "lora.rank"
    assert "--max-lora-rank" in error["message"]


def test_target_modules_that_the_model_lacks_are_refused(server: Server) -> None:
    body = {"name": "x", "project": PROJECT, "base_model": "art/tiny"}
    error = post(server, "/api/models", body | {"lora": {"target_modules": ["no_such_layer"]}})
    assert error["status"] == 422 and error["param"] == "lora"
    assert not (server.model_dir("x") / "model.json").exists()


def test_another_adapter_shape_for_a_known_model_is_refused(server: Server) -> None:
    register(server, "shape")
    body = {"name": "shape", "project": PROJECT, "base_model": "art/tiny", "lora": {"rank": 4}}
    assert post(server, "/api/models", body)["code"] == "lora_differs"


def test_unknown_models_and_steps_are_named(server: Server) -> None:
    register(server, "known")
    message = [{"role": "user", "content": "hi"}]
    error = post(server, "/v1/chat/completions", {"model": "knwn", "messages": message})
    assert (error["status"], error["code"]) == (404, "unknown_model") and f"{PROJECT}/known" in error["message"]
    error = post(server, "/v1/chat/completions", {"model": "known@7", "messages": message})
    assert (error["status"], error["code"]) == (404, "unknown_step")
    error = post(server, f"/api/models/{PROJECT}/nobody/train", {"groups": []})
    assert error["status"] == 404 and error["code"] == "unknown_model"


def test_bodies_that_are_not_requests_are_refused(server: Server) -> None:
    assert post(server, "/v1/chat/completions", b"{nonsense")["status"] == 422
    assert post(server, "/v1/chat/completions", {"messages": []})["param"] == "model"
    assert post(server, "/api/models", b"[]")["status"] == 422
    error = post(server, "/api/models", {"name": "a", "project": "b", "base_model": "c", "more": 1})
    assert error["param"] == "more"


def test_a_context_longer_than_the_model_s_is_refused(server: Server) -> None:
    register(server, "known")
    message = [{"role": "user", "content": "word " * 5000}]
    error = post(server, "/v1/chat/completions", {"model": "known", "messages": message})
    assert error["status"] == 400 and "1024" in error["message"]


@pytest.fixture(scope="module")
def group(server: Server) -> dict[str, Any]:
    register(server, "bad")
    with server.client() as client:
        return sampled_group(client, f"{PROJECT}/bad", logprobs=True)


def train_error(server: Server, groups: Any, **more: Any) -> dict[str, Any]:
    error = post(server, f"/api/models/{PROJECT}/bad/train", {"groups": groups, **more})
    with server.client() as client:
        assert client.get(f"/api/models/{PROJECT}/bad").json()["step"] == 0
    return error


def changed(group: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    copy = json.loads(json.dumps(group))
    copy["trajectories"][1].update(fields)
    return [copy]


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None, "high"])
def test_rewards_that_are_not_numbers_are_named(server: Server, group: dict[str, Any], reward: Any) -> None:
    error = train_error(server, changed(group, reward=reward))
    assert error["status"] == 422 and error["param"] == "groups[0].trajectories[1].reward"


def test_a_missing_reward_is_named(server: Server, group: dict[str, Any]) -> None:
    copy = json.loads(json.dumps(group))
    del copy["trajectories"][0]["reward"]
    error = train_error(server, [copy])
    assert error["param"] == "groups[0].trajectories[0].reward"


def test_malformed_trajectories_are_named(server: Server, group: dict[str, Any]) -> None:
    error = train_error(server, changed(group, messages_and_choices="hello"))
    assert error["param"] == "groups[0].trajectories[1].messages_and_choices"
    assert train_error(server, [])["param"] == "groups"
    assert train_error(server, [group], config={"learning_rate": -1})["param"] == "config.learning_rate"
    assert train_error(server, [group], config={"lr": 1})["param"] == "config.lr"


def test_nothing_to_train_says_why(server: Server) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    trajectory = {"messages_and_choices": messages, "reward": 1.0}
    error = train_error(server, [{"trajectories": [trajectory]}])
    assert error["code"] == "no_trainable_turn" and "groups[0].trajectories[0]" in error["message"]
    failure = {"type": "TimeoutError", "message": "the tool hung"}
    error = train_error(server, [{"trajectories": [], "exceptions": [failure]}])
    assert error["code"] == "no_trainable_turn" and "the tool hung" in error["message"]


def test_tokens_that_cannot_be_are_refused(server: Server, group: dict[str, Any]) -> None:
    copy = json.loads(json.dumps(group))
    choices = [trajectory["messages_and_choices"][1] for trajectory in copy["trajectories"]]
    for choice in choices:
        choice["prompt_token_ids"] = [1, 2, 10**9]
    error = train_error(server, [copy])
    assert error["code"] == "no_trainable_turn"
    assert CHANGED_IDS in error["message"]
    for choice in choices:
        del choice["art"]  # Sampled elsewhere: no record contradicts its ids.
    error = train_error(server, [copy])
    assert error["code"] == "no_trainable_turn" and CHANGED_IDS not in error["message"]


def test_a_log_beyond_the_newest_step_is_refused(server: Server) -> None:
    register(server, "logs-ahead")
    path = f"/api/models/{PROJECT}/logs-ahead/log"
    error = post(server, path, {"step": 99, "metrics": {"score": 1.0}})
    assert error["status"] == 422 and error["code"] == "step_beyond_newest"
    assert error["param"] == "step"
    assert not (server.model_dir("logs-ahead") / "history.jsonl").exists()
    with server.client() as client:
        assert client.post(path, json={"step": 0, "metrics": {"score": 1.0}}).status_code == 200
