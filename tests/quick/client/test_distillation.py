"""Advantages from a teacher, against numbers by hand. The teacher is a scripted server."""

import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai.types.chat.chat_completion import Choice

import art
from tests.quick.client.conftest import Answer, FakeServer, Request

pytestmark = pytest.mark.anyio


class Teacher:
    """Gives the token t the log-probability -t / 10."""

    def __init__(self, server: FakeServer) -> None:
        self.prompts: list[list[int]] = []
        self.knows_prompts = True
        self.model = art.Model(
            name="teacher",
            project="p",
            inference_model_name="big",
            inference_base_url=f"{server.url}/v1",
            inference_api_key="k",
        )
        server.on("POST", "/v1/completions", self.reply)

    def reply(self, request: Request) -> Answer:
        body = request.json()
        assert (body["model"], body["prompt_logprobs"], body["max_tokens"]) == ("big", 0, 1)
        self.prompts.append(body["prompt"])
        entries = [{str(t): {"logprob": -t / 10, "rank": 1}} for t in body["prompt"]]
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "text": "x"}
        if self.knows_prompts:
            choice["prompt_logprobs"] = [None, *entries[1:]]
        kind = {"id": "1", "object": "text_completion", "created": 1, "model": "big"}
        return Answer(body=kind | {"choices": [choice]})


@pytest.fixture
async def teacher(server: FakeServer) -> AsyncIterator[Teacher]:
    scripted = Teacher(server)
    yield scripted
    await scripted.model.close()


def choice(prompt: list[int], tokens: list[int], logprob: float = -0.5, identity: str | None = None) -> Choice:
    entries = [{"token": f"token_id:{t}", "logprob": logprob, "bytes": None, "top_logprobs": []} for t in tokens]
    return Choice.model_validate(
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "x"},
            "logprobs": {"content": entries, "refusal": None},
            "prompt_token_ids": prompt,
            "token_ids": tokens,
        }
        | ({"art": {"id": identity}} if identity is not None else {})
    )


def user(text: str = "q") -> Any:
    return {"role": "user", "content": text}


async def test_advantages_are_the_difference_of_log_probabilities(teacher: Teacher) -> None:
    two_turns = art.Trajectory(
        messages_and_choices=[user(), choice([1, 2], [3, 4]), user(), choice([1, 2, 3, 4, 9], [7])],
        reward=0.25,
        metrics={"win": 1},
    )
    branch = art.History(messages_and_choices=[user("side"), choice([1, 2], [3, 8])])
    other = art.Trajectory(
        messages_and_choices=[user(), choice([1, 2], [3, 4])], additional_histories=[branch], reward=0.25
    )
    groups = [art.TrajectoryGroup([two_turns, other])]
    (taught,) = await art.distill(groups, teacher.model)
    first, second = taught.trajectories
    # After [1, 2] all three sampled 3 (gap 0.2). After [1, 2, 3] they sampled 4, 4 and 8: gaps 0.1, 0.1 and -0.3.
    mean = (0.1 + 0.1 - 0.3) / 3
    assert first.turn_advantages == [pytest.approx([0.0, 0.1 - mean]), pytest.approx([-0.2])]
    assert first.metrics == {"win": 1, "teacher_gap": pytest.approx((0.2 + 0.1 - 0.2) / 3)}
    assert second.additional_histories[0].turn_advantages == [pytest.approx([0.0, -0.3 - mean])]
    assert second.metrics == {"teacher_gap": pytest.approx((0.2 + 0.1 + 0.2 - 0.3) / 4)}
    assert sorted(teacher.prompts) == [[1, 2, 3, 4, 9, 7], [1, 2, 3, 8]], "each text is scored once"
    assert two_turns.turn_advantages is None and first.reward == 0.25
    assert first.messages_and_choices is two_turns.messages_and_choices


@pytest.mark.parametrize("identity", ["c-0", None])
async def test_a_turn_that_branches_share_counts_once(teacher: Teacher, identity: str | None) -> None:
    def shared() -> Choice:
        return choice([1, 2], [3], identity=identity)

    branch = art.History(messages_and_choices=[user(), shared(), user(), choice([1, 2, 3, 9], [8])])
    branched = art.Trajectory(messages_and_choices=[user(), shared()], additional_histories=[branch], reward=0.0)
    (taught,) = await art.distill([art.TrajectoryGroup([branched])], teacher.model)
    (branched_with_advantages,) = taught.trajectories
    # One sample after [1, 2] has no siblings: its gap is its advantage.
    assert branched_with_advantages.turn_advantages == [pytest.approx([0.2])]
    of_branch = branched_with_advantages.additional_histories[0].turn_advantages
    assert of_branch == [pytest.approx([0.2]), pytest.approx([-0.3])]
    assert branched_with_advantages.metrics["teacher_gap"] == pytest.approx((0.2 - 0.3) / 2)


async def test_equal_turns_with_other_ids_are_two_samples(teacher: Teacher) -> None:
    first, second = (choice([1, 2], [3], identity=name) for name in ("c-0", "c-1"))
    sampled = art.Trajectory(
        messages_and_choices=[user(), first],
        additional_histories=[art.History(messages_and_choices=[user(), second])],
        reward=0.0,
    )
    (taught,) = await art.distill([art.TrajectoryGroup([sampled])], teacher.model)
    assert taught.trajectories[0].turn_advantages == [pytest.approx([0.0])]


async def test_an_advantage_is_bounded(teacher: Teacher) -> None:
    sampled = art.Trajectory(messages_and_choices=[user(), choice([1], [90, 1])], reward=0.0)
    (taught,) = await art.distill([art.TrajectoryGroup([sampled])], teacher.model, max_advantage=2.0)
    assert taught.trajectories[0].turn_advantages == [pytest.approx([-2.0, 0.4])]


async def test_what_cannot_be_scored_is_said(teacher: Teacher) -> None:
    bare = Choice.model_validate(
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "x"}}
    )
    group = art.TrajectoryGroup([art.Trajectory(messages_and_choices=[user(), bare], reward=0.0)])
    with pytest.raises(ValueError, match="logprobs"):
        await art.distill([group], teacher.model)
    teacher.knows_prompts = False
    full = art.Trajectory(messages_and_choices=[user(), choice([1], [2])], reward=0.0)
    with pytest.raises(art.ArtError, match="prompt_logprobs"):
        await art.distill([art.TrajectoryGroup([full])], teacher.model)


async def test_no_concurrency_is_refused(teacher: Teacher) -> None:
    with pytest.raises(ValueError, match="max_concurrent"):
        await art.distill([], teacher.model, max_concurrent=0)


async def test_trajectories_without_samples_stay_as_they_are(teacher: Teacher) -> None:
    demonstration = art.Trajectory(messages_and_choices=[user(), {"role": "assistant", "content": "a"}], reward=1.0)
    (taught,) = await art.distill([art.TrajectoryGroup([demonstration])], teacher.model)
    assert taught.trajectories[0].metrics == {} and not teacher.prompts
    assert taught.trajectories[0].turn_advantages == []
    assert math.isclose(taught.trajectories[0].reward, 1.0)


async def test_one_token_that_the_teacher_never_says_does_not_outweigh_its_siblings(teacher: Teacher) -> None:
    """Seven siblings with the gap 0 and one with -40, which counts as -5: the mean is -5/8."""
    siblings = [choice([1], [3], logprob=-0.3)] * 7 + [choice([1], [403], logprob=-0.3)]
    group = art.TrajectoryGroup(
        art.Trajectory(messages_and_choices=[user(), answer], reward=0.0) for answer in siblings
    )
    (advised,) = await art.distill([group], teacher.model)
    *same, outlier = [trajectory.turn_advantages for trajectory in advised.trajectories]
    assert same == [[pytest.approx([0.625])]] * 7
    assert outlier == [pytest.approx([-4.375])]
    assert advised.trajectories[-1].metrics["teacher_gap"] == pytest.approx(-40.0)
