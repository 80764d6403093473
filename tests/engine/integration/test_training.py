"""Training through the server: steps, waiting inference, agreement of engine and trainer."""

import json
import threading
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

import art
from art_protocol.history import read_rows
from tests.live import (
    PROJECT,
    Server,
    chat,
    register,
    sampled_group,
    train,
    train_one_step,
)


def test_a_step_leaves_checkpoint_history_and_trajectories(server: Server) -> None:
    register(server, "leaves")
    done = train_one_step(server, "leaves")
    assert done["event"] == "done" and done["step"] == 1
    folder = server.model_dir("leaves")
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["0000", "0001"]
    files = {p.name for p in (folder / "checkpoints" / "0001").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors"} <= files
    before = load_file(folder / "checkpoints" / "0000" / "adapter_model.safetensors")
    after = load_file(folder / "checkpoints" / "0001" / "adapter_model.safetensors")
    assert any(not before[key].equal(after[key]) for key in before)
    (row,) = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    (group,) = read_rows(folder / "trajectories" / "train" / "0001.jsonl.gz")
    rewards = [trajectory["reward"] for trajectory in group["trajectories"]]
    assert row["step"] == 1 and len(rewards) == 4 and row["train/reward"] == sum(rewards) / 4


def test_engine_and_trainer_agree_on_a_trained_adapter(server: Server) -> None:
    """Both run in float32; the trainer scores fresh samples of an adapter with non-zero weights."""
    register(server, "agree")
    for _ in range(3):
        assert train_one_step(server, "agree", learning_rate=3e-3)["event"] == "done"
    with server.client() as client:
        groups = [sampled_group(client, f"{PROJECT}/agree", size=16, max_tokens=24) for _ in range(4)]
        done = train(client, "agree", groups)[-1]
    metrics = done["metrics"]
    assert metrics["data/step_trainable_assistant_tokens"] >= 64
    assert metrics["loss/logprob_gap_mean"] < 2e-6, "rounding of float32; the mean of other tokens was 1.01e-6"
    assert metrics["loss/logprob_gap_max"] < 1e-4


def test_the_same_key_returns_the_same_job(server: Server) -> None:
    register(server, "again")
    with server.client() as client:
        group = sampled_group(client, f"{PROJECT}/again")
        first = train(client, "again", [group], key="one")
        second = train(client, "again", [group], key="one")
        assert first[-1] == second[-1]
        assert client.get(f"/api/models/{PROJECT}/again").json()["step"] == 1
        other = sampled_group(client, f"{PROJECT}/again")
        url = f"/api/models/{PROJECT}/again/train"
        reused = client.post(url, json={"groups": [other]}, headers={"idempotency-key": "one"})
        assert reused.status_code == 409 and reused.json()["error"]["code"] == "key_reused"
        assert train(client, "again", [group], key="two")[-1]["step"] == 2


@pytest.mark.anyio
async def test_examples_have_a_validation_loss_and_no_reward(server: Server) -> None:
    questions = ("respond with yes, no, maybe", "answer with no, maybe, yes")
    examples = [
        art.Trajectory(
            messages_and_choices=[{"role": "user", "content": question}, {"role": "assistant", "content": "maybe"}]
        )
        for question in questions
    ]
    async with art.Backend(server.url) as backend:
        model = art.TrainableModel(name="examples", project=PROJECT, base_model="art/tiny")
        await model.register(backend)
        config = art.TrainSFTConfig(learning_rate=2e-3, epochs=2, batch_size=1)
        results = [await model.train_sft(examples[:1], config, validation=examples[1:]) for _ in range(3)]
        _, *checkpoints = await model.checkpoints()
        await model.train_sft(examples, config)
        last = (await model.checkpoints())[-1]
    losses = [result.metrics["val/loss"] for result in results]
    assert losses[0] > losses[2] and [len(result.report.losses) for result in results] == [2, 2, 2]
    for result, checkpoint in zip(results, checkpoints, strict=True):
        assert result.metrics["loss/train"] == pytest.approx(sum(result.report.losses) / 2)
        assert checkpoint.metrics["val/loss"] == result.metrics["val/loss"]
        assert not [name for name in checkpoint.metrics if "reward" in name]
        assert result.report.num_trajectories == 1
        assert checkpoint.is_best is (result.metrics["val/loss"] == min(losses))
    assert "val/loss" not in last.metrics and not last.is_best
    (group,) = read_rows(server.model_dir("examples") / "trajectories" / "train" / "0001.jsonl.gz")
    assert group["trajectories"][0]["messages"][0]["content"] == questions[0]


def test_equal_rewards_advance_the_step_and_keep_the_weights(server: Server) -> None:
    register(server, "equal")
    with server.client() as client:
        group = sampled_group(client, f"{PROJECT}/equal")
        for trajectory in group["trajectories"]:
            trajectory["reward"] = 1.0
        done = train(client, "equal", [group])[-1]
    assert done["step"] == 1 and done["report"]["num_groups_trained"] == 0
    folder = server.model_dir("equal") / "checkpoints"
    assert json.loads((folder / "0001" / "checkpoint.json").read_text())["unchanged"] is True
    name = "adapter_model.safetensors"
    before, after = load_file(folder / "0000" / name), load_file(folder / "0001" / name)
    assert all(before[key].equal(after[key]) for key in before)


def test_requests_in_the_middle_of_training_are_answered_by_the_new_step(server: Server) -> None:
    """Sends whole and streaming requests while the trainer works."""
    register(server, "waits")
    with server.client() as client:
        model = f"{PROJECT}/waits"
        group = sampled_group(client, model, size=8)
        answers: dict[str, Any] = {}

        def ask(kind: str) -> None:
            with server.client() as other:
                body = {"model": model, "messages": [{"role": "user", "content": "yes or no?"}]}
                body |= {"max_tokens": 4, "stream": kind == "stream"}
                answers[kind] = other.post("/v1/chat/completions", json=body)

        threads = [threading.Thread(target=ask, args=(kind,)) for kind in ("whole", "stream")]
        body = {"groups": [group], "config": {"learning_rate": 1e-4, "passes": 32}}
        event: dict[str, Any] = {}
        with client.stream("POST", f"/api/models/{model}/train", json=body) as response:
            for line in response.iter_lines():
                event = json.loads(line)
                if event.get("phase") == "train" and not threads[0].ident:
                    for thread in threads:
                        thread.start()
        assert event["event"] == "done", event
        for thread in threads:
            thread.join()
    whole = answers["whole"]
    assert whole.status_code == 200 and whole.headers["x-art-step"] == "1"
    assert whole.json()["choices"][0]["art"]["step"] == 1
    stream = answers["stream"]
    assert stream.status_code == 200
    marks = [line for line in stream.text.splitlines() if '"art"' in line]
    assert json.loads(marks[-1][6:])["choices"][0]["art"]["step"] == 1
    assert stream.text.rstrip().endswith("data: [DONE]")


def test_choices_of_another_model_are_not_trained(server: Server) -> None:
    register(server, "self")
    register(server, "opponent")
    with server.client() as client:
        mine = sampled_group(client, f"{PROJECT}/self")
        other = sampled_group(client, f"{PROJECT}/opponent")
        for one, two in zip(mine["trajectories"], other["trajectories"], strict=True):
            one["messages_and_choices"].append(two["messages_and_choices"][1])
        report = train(client, "self", [mine])[-1]["report"]
    assert report["turns"] == {"ledger": 4}
    assert report["dropped"][0]["count"] == 4 and "another model" in report["dropped"][0]["reason"]


def test_validation_is_logged_and_the_best_checkpoint_is_kept(server: Server) -> None:
    register(server, "best")
    with server.client() as client:
        for reward in (0.2, 0.9, 0.4):
            assert train_one_step(server, "best")["event"] == "done"
            group = sampled_group(client, f"{PROJECT}/best", size=1)
            group["trajectories"][0]["reward"] = reward
            url = f"/api/models/{PROJECT}/best"
            reply = client.post(f"{url}/log", json={"groups": [group], "split": "val"}).json()
            assert reply["metrics"]["val/reward"] == reward
        reply = client.post(f"{url}/checkpoints/delete", json={}).json()
        assert reply == {"kept": [2, 3], "deleted": [0, 1]}
        gone = client.post(
            "/v1/chat/completions",
            json={"model": f"{PROJECT}/best@1", "messages": [{"role": "user", "content": "hi"}]},
        )
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "unknown_step")
        assert chat(client, f"{PROJECT}/best@2")["choices"][0]["art"]["step"] == 2


def test_a_step_that_is_made_again_reads_no_prompt_of_the_one_before(server: Server) -> None:
    """vLLM caches prompts under the adapter's name, and after a rollback the same name has other weights."""
    register(server, "rolled")
    long = "respond with yes, no, maybe " * 40

    def score(client: httpx.Client, **more: Any) -> list[float]:
        message = {"role": "user", "content": long}
        wanted = {"messages": [message], "logprobs": True, "temperature": 0, "max_tokens": 4}
        body = chat(client, f"{PROJECT}/rolled@1", **wanted, **more)
        return [entry["logprob"] for entry in body["choices"][0]["logprobs"]["content"]]

    with server.client() as client:
        group = sampled_group(client, f"{PROJECT}/rolled")
        assert train(client, "rolled", [group], learning_rate=1e-2)[-1]["step"] == 1
        first = score(client)
        url = f"/api/models/{PROJECT}/rolled/rollback"
        assert client.post(url, json={"step": 0}).status_code == 200
        for trajectory in group["trajectories"]:
            trajectory["reward"] = -trajectory["reward"]
        assert train(client, "rolled", [group], learning_rate=1e-2)[-1]["step"] == 1
        second, uncached = score(client), score(client, cache_salt="never used before")
    assert second == pytest.approx(uncached, abs=1e-5)
    assert second[0] != pytest.approx(first[0], abs=1e-3)
