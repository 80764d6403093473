"""What a call of `model.train_sft` sends."""

from typing import Any

import pytest

import art
from art.types import Choice
from tests.quick.client.demonstrations import example, sent

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("server_trains")]


async def test_every_assistant_message_is_trained(server: Any, model: art.TrainableModel) -> None:
    result = await model.train_sft([example("a", "x", "y"), example("b", "z")])
    assert result.step == 4 and result.metrics["loss/train"] == 0.5
    body = sent(server)
    weights = [g["trajectories"][0]["turn_advantages"] for g in body["groups"]]
    assert weights == [[1.0, 1.0], [1.0]]
    config = body["config"]
    assert (config["objective"], config["batch_size"], config["sampling"]) == (
        "likelihood",
        2,
        "raw",
    )
    assert config["learning_rate"] == 5e-5 and config["allow_training_without_logprobs"]


async def test_the_last_message_alone(server: Any, model: art.TrainableModel) -> None:
    config = art.TrainSFTConfig(learning_rate=[1e-4, 0.0], batch_size=1, assistant_turns="last", epochs=1)
    choice = Choice.model_validate(
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "c"}}
    )
    sampled = example("b", "z")
    sampled.messages_and_choices += [{"role": "user", "content": "more"}, choice]
    sampled.additional_histories = [art.History(messages_and_choices=[{"role": "user", "content": "q"}])]
    await model.train_sft([example("a", "x", "y"), sampled], config)
    first, second = (g["trajectories"][0] for g in sent(server)["groups"])
    assert first["turn_advantages"] == second["turn_advantages"] == [0.0, 1.0]
    assert second["additional_histories"][0]["turn_advantages"] == []
    assert sent(server)["config"]["learning_rate"] == [1e-4, 0.0]
    assert sampled.turn_advantages is None, "the trajectory itself stays as it is"


async def test_weights_of_ones_own_stay(server: Any, model: art.TrainableModel) -> None:
    weighed = example("a", "x", "y")
    weighed.turn_advantages = [0.5, None]
    await model.train_sft([weighed])
    assert sent(server)["groups"][0]["trajectories"][0]["turn_advantages"] == [0.5, None]


async def test_the_best_of_each_group(server: Any, model: art.TrainableModel) -> None:
    def group(*rewards: float) -> art.TrajectoryGroup:
        members = [example(f"{reward}", "x") for reward in rewards]
        for member, reward in zip(members, rewards, strict=True):
            member.reward = reward
        return art.TrajectoryGroup(members)

    entries = [group(0.0, 1.0, 0.5), example("alone", "y"), group(1.0, 1.0)]
    await model.train_sft(entries, art.TrainSFTConfig(best_of_group=True))
    chosen = [g["trajectories"][0]["messages_and_choices"][0] for g in sent(server)["groups"]]
    assert [message["content"] for message in chosen] == ["1.0", "alone"]
    await model.train_sft(entries)
    assert len(sent(server)["groups"]) == 6


async def test_validation_is_sent_last_and_held_out(server: Any, model: art.TrainableModel) -> None:
    await model.train_sft([example("a", "x"), example("b", "y")], validation=[example("c", "z")])
    body = sent(server)
    asked = [group["trajectories"][0]["messages_and_choices"][0]["content"] for group in body["groups"]]
    assert asked == ["a", "b", "c"] and body["config"]["held_out"] == 1
    one_rate = art.TrainSFTConfig(learning_rate=[1e-4], batch_size=2)
    await model.train_sft([example("a", "x"), example("b", "y")], one_rate, validation=[example("c", "z")])
    await model.train_sft([example("a", "x")])
    assert "held_out" not in sent(server)["config"], "an older server does not know the field"
    with pytest.raises(ValueError, match="all trajectories are in `validation`"):
        await model.train_sft([], validation=[example("c", "z")])
    with pytest.raises(ValueError, match="held_out is 1, and measures demonstrations"):
        art.TrainConfig(held_out=1)


async def test_what_cannot_be_trained_is_refused(model: art.TrainableModel) -> None:
    with pytest.raises(ValueError, match="groups"):
        await model.train_sft([])
    few = art.TrainSFTConfig(learning_rate=[1e-4], batch_size=1)
    with pytest.raises(ValueError, match="learning_rate"):
        await model.train_sft([example("a", "x"), example("b", "y")], few)
