"""Advantages from a teacher, against numbers by hand. The teacher is a scripted server."""

import base64
import math
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai.types.chat.chat_completion import Choice

import art
from art_protocol.wire import TeacherTop
from tests.quick.client.conftest import Answer, FakeServer, Request

pytestmark = pytest.mark.anyio


HINT = 99


class Teacher:
    """Gives the token t the log-probability -t / 10, and behind a hint -t / 20. The likeliest tokens are 1, 2, 3... Renders each
    word as its number."""

    def __init__(self, server: FakeServer) -> None:
        self.prompts: list[list[int]] = []
        self.knows_prompts = True
        self.mark: dict[str, Any] = {}
        self.chats: list[dict[str, Any]] = []
        self.room = 100
        self.max_logprobs = 20
        self.model = art.Model(
            name="teacher",
            project="p",
            inference_model_name="big",
            inference_base_url=f"{server.url}/v1",
            inference_api_key="k",
        )
        server.on("POST", "/v1/completions", self.reply)
        server.on("POST", "/v1/chat/completions", self.render)

    def render(self, request: Request) -> Answer:
        body = request.json()
        assert (body["model"], body["return_token_ids"], body["max_tokens"]) == ("big", True, 1)
        self.chats.append(body)
        prompt = [int(word) for message in body["messages"] for word in message["content"].split()]
        if len(prompt) > self.room:
            return Answer(400, {"error": {"message": "This model's maximum context length is 100 tokens"}})
        kind = {"id": "1", "object": "chat.completion", "created": 1, "model": "big"}
        message = {"role": "assistant", "content": "x"}
        choices = [{"index": 0, "finish_reason": "length", "message": message}]
        return Answer(body=kind | {"choices": choices} | ({"prompt_token_ids": prompt} if self.knows_prompts else {}))

    def reply(self, request: Request) -> Answer:
        body = request.json()
        assert (body["model"], body["max_tokens"]) == ("big", 1)
        if body["prompt_logprobs"] > self.max_logprobs:
            message = f"Requested prompt logprobs of 30, which is greater than max allowed: {self.max_logprobs}"
            return Answer(400, {"error": {"message": message}})
        self.prompts.append(body["prompt"])
        scale = 20 if HINT in body["prompt"] else 10
        likeliest = range(1, 1 + body["prompt_logprobs"])
        entries = [{str(t): {"logprob": -t / scale, "rank": 1} for t in {*likeliest, own}} for own in body["prompt"]]
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "text": "x", "art": self.mark}
        if self.knows_prompts:
            choice["prompt_logprobs"] = [None, *entries[1:]]
        kind = {"id": "1", "object": "text_completion", "created": 1, "model": "big"}
        return Answer(body=kind | {"choices": [choice]})


@pytest.fixture
async def teacher(server: FakeServer) -> AsyncIterator[Teacher]:
    scripted = Teacher(server)
    yield scripted
    await scripted.model.close()


def choice(
    prompt: list[int], tokens: list[int], logprob: float = -0.5, identity: str | None = None, **mark: Any
) -> Choice:
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
        | ({"art": {"id": identity, **mark}} if identity is not None else {})
    )


def user(text: Any = "q") -> Any:
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


# --- a teacher that reads more than the student -----------------------------------------------------------------------


def told(messages: Any, trajectory: art.Trajectory, group: art.TrajectoryGroup) -> Any:
    """The messages with the trajectory's hint, if it has one."""
    hint = trajectory.metadata.get("hint")
    return None if hint is None else [*messages, user(hint)]


def hinted(*entries: Any, hint: str | None = f"{HINT}") -> art.Trajectory:
    return art.Trajectory(messages_and_choices=list(entries), metadata={} if hint is None else {"hint": hint})


async def test_a_teacher_that_reads_more_scores_the_same_tokens(teacher: Teacher) -> None:
    """The two siblings with one hint keep their gaps: no mean is subtracted."""
    siblings = [hinted(user("1 2"), choice([1, 2], [3, 4])) for _ in range(2)]
    left_out = hinted(user("1 2"), choice([1, 2], [3, 8]), hint=None)
    (taught,) = await art.distill([art.TrajectoryGroup([*siblings, left_out])], teacher.model, teacher_messages=told)
    for trajectory in taught.trajectories[:2]:
        assert trajectory.turn_advantages == [pytest.approx([0.5 - 3 / 20, 0.5 - 4 / 20])]
        assert trajectory.metrics["teacher_gap"] == pytest.approx(0.5 - 7 / 40)
    assert taught.trajectories[2].turn_advantages == [[0.0, 0.0]]
    assert "teacher_gap" not in taught.trajectories[2].metrics
    assert teacher.prompts == [[1, 2, HINT, 3, 4]], "equal texts are scored once"
    assert len(teacher.chats) == 1, "equal messages are rendered once"
    assert siblings[0].turn_advantages is None


async def test_each_turn_has_its_teacher_s_messages(teacher: Teacher) -> None:
    branch = art.History(messages_and_choices=[user("8"), choice([8], [2])])
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    first = choice([1], [3], identity="c-0")
    first.message.content = "33"
    played = hinted(user("1"), first, user("5"), choice([1, 3, 5], [4]))
    played.additional_histories, played.tools = [branch], tools
    (taught,) = await art.distill(
        [art.TrajectoryGroup([played])], teacher.model, teacher_messages=told, chat_template_kwargs={"thinking": False}
    )
    (advised,) = taught.trajectories
    assert sorted(teacher.prompts) == [[1, 33, 5, HINT, 4], [1, HINT, 3], [8, HINT, 2]]
    assert advised.turn_advantages == [pytest.approx([0.35]), pytest.approx([0.3])]
    assert advised.additional_histories[0].turn_advantages == [pytest.approx([0.4])]
    assert [chat.get("tools") for chat in teacher.chats].count(tools) == 2
    assert {chat["chat_template_kwargs"]["thinking"] for chat in teacher.chats} == {False}


def read_target(target: TeacherTop | None) -> list[list[tuple[int, Any]]]:
    """The tokens at each position, with their log-probabilities."""
    assert target is not None
    ids = struct.iter_unpack("<i", base64.b64decode(target.token_ids))
    logprobs = struct.iter_unpack("<f", base64.b64decode(target.logprobs))
    pairs = [(token, pytest.approx(logprob)) for (token,), (logprob,) in zip(ids, logprobs, strict=True)]
    return [pairs[start : start + target.top_k] for start in range(0, len(pairs), target.top_k)]


async def test_the_teacher_s_likeliest_tokens_are_targets(teacher: Teacher) -> None:
    """The sampled token takes the last entry where it is none of the likeliest."""
    told_so = hinted(user("1 2"), choice([1, 2], [2, 9]))
    left_out = hinted(user("1 2"), choice([1, 2], [3]), hint=None)
    (taught,) = await art.distill(
        [art.TrajectoryGroup([told_so, left_out])], teacher.model, teacher_messages=told, top_k=3
    )
    first, second = taught.trajectories
    (target,) = first.turn_targets or []
    assert target is not None and target.top_k == 3
    assert read_target(target) == [[(1, -0.05), (2, -0.1), (3, -0.15)], [(1, -0.05), (2, -0.1), (9, -0.45)]]
    assert first.turn_advantages == [[0.0, 0.0]] and first.metrics["teacher_gap"] == pytest.approx(0.5 - 11 / 40)
    assert (second.turn_targets, second.turn_advantages) == ([None], [[0.0]])
    assert art.Trajectory.model_validate_json(first.model_dump_json()).turn_targets == first.turn_targets
    (plain,) = await art.distill([art.TrajectoryGroup([told_so])], teacher.model, top_k=1)
    (target,) = plain.trajectories[0].turn_targets or []
    assert read_target(target) == [[(2, -0.2)], [(9, -0.9)]], "without teacher_messages, too"


async def test_who_reads_the_same_as_the_policy_that_sampled_gives_no_targets(teacher: Teacher) -> None:
    teacher.mark = SAME
    group = art.TrajectoryGroup([hinted(user("1 2"), choice([1, 2], [3], identity="c-0", **SAME))])
    for messages in (None, lambda messages, *_: messages):
        (taught,) = await art.distill([group], teacher.model, teacher_messages=messages, top_k=3)
        assert taught.trajectories[0].turn_targets == [None]


async def test_a_top_k_that_cannot_be_is_said(teacher: Teacher) -> None:
    group = art.TrajectoryGroup([hinted(user("1 2"), choice([1, 2], [3]))])
    with pytest.raises(ValueError, match="top_k"):
        await art.distill([group], teacher.model, top_k=0)
    with pytest.raises(art.ArtError, match="max_logprobs"):
        await art.distill([group], teacher.model, top_k=30)


SAME = {"step": 3, "model": "p/student"}


@pytest.mark.parametrize(
    ("of_teacher", "advantage"),
    [(SAME, 0.0), (SAME | {"step": 2}, 0.2), ({}, 0.2), ({"step": None, "model": None}, 0.2)],
)
async def test_who_reads_the_same_as_the_policy_that_sampled_teaches_nothing(
    teacher: Teacher, of_teacher: dict[str, Any], advantage: float
) -> None:
    """An earlier step that reads the same teaches: it holds the policy back."""
    teacher.mark = of_teacher
    sampled = hinted(user("1 2"), choice([1, 2], [3], identity="c-0", **SAME))
    (taught,) = await art.distill(
        [art.TrajectoryGroup([sampled])], teacher.model, teacher_messages=lambda messages, *_: messages
    )
    (advantages,) = taught.trajectories[0].turn_advantages or []
    assert advantages == ([0.0] if advantage == 0 else pytest.approx([advantage]))


async def test_a_trajectory_s_group_is_that_of_the_caller(teacher: Teacher) -> None:
    right, wrong = hinted(user("1"), choice([1], [3])), hinted(user("1"), choice([1], [4]))
    right.reward = 1.0
    group = art.TrajectoryGroup([right, wrong])

    def shown(messages: Any, trajectory: art.Trajectory, group: art.TrajectoryGroup) -> Any:
        siblings = [sibling for sibling in group if sibling is not trajectory and sibling.reward == 1]
        return [*messages, user(f"{HINT}")] if siblings else None

    (taught,) = await art.distill([group], teacher.model, teacher_messages=shown)
    assert [trajectory.turn_advantages for trajectory in taught] == [[[0.0]], [pytest.approx([0.3])]]


@pytest.mark.parametrize(
    ("messages", "error", "words"),
    [
        ([], ValueError, "empty list"),
        ([user("1"), {"role": "assistant", "content": "3"}], ValueError, "end with an answer"),
        ([user("1 " * 101)], art.ArtError, "shorten the feedback"),
    ],
)
async def test_messages_that_no_teacher_can_read_are_refused(
    teacher: Teacher, messages: Any, error: type[Exception], words: str
) -> None:
    group = art.TrajectoryGroup([hinted(user("1"), choice([1], [3]))])
    with pytest.raises(error, match=words):
        await art.distill([group], teacher.model, teacher_messages=lambda *_: messages)
    assert not teacher.prompts


async def test_a_teacher_without_the_prompt_s_tokens_is_named(teacher: Teacher) -> None:
    teacher.knows_prompts = False
    group = art.TrajectoryGroup([hinted(user("1"), choice([1], [3]))])
    with pytest.raises(art.ArtError, match="'big' gives no prompt_token_ids"):
        await art.distill([group], teacher.model, teacher_messages=told)


# --- art.with_feedback ------------------------------------------------------------------------------------------------


def with_feedback(messages: list[Any], **texts: str) -> list[Any]:
    hinted: Any = art.with_feedback(messages, **texts)
    return hinted


def test_a_solution_displaces_the_feedback() -> None:
    (both,) = with_feedback([user()], feedback="line 3 fails", solution="<think>\nhm\n</think>\n\n42")
    assert "42" in both["content"] and "line 3" not in both["content"] and "hm" not in both["content"]
    (error,) = with_feedback([user()], feedback="line 3 fails")
    assert error["content"].startswith("q\n") and "line 3 fails" in error["content"]


@pytest.mark.parametrize("texts", [{}, {"feedback": " "}, {"solution": "<think>\nhm\n</think>\n"}])
def test_without_a_text_nothing_is_learnt(texts: dict[str, str]) -> None:
    assert art.with_feedback([user()], **texts) is None


def test_the_text_is_in_the_last_user_message() -> None:
    call: Any = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    result: Any = {"role": "tool", "content": "7", "tool_call_id": "1"}
    messages = [user("a"), call, result]
    first, *rest = with_feedback(messages, feedback="no")
    assert first["content"].startswith("a\n\n") and "no" in first["content"] and rest == [call, result]
    assert messages[0] == user("a")
    (parts,) = with_feedback([user([{"type": "image_url"}])], feedback="no")
    assert [part["type"] for part in parts["content"]] == ["image_url", "text"]
    system: Any = {"role": "system", "content": "s"}
    assert [message["role"] for message in with_feedback([system], feedback="no")] == ["system", "user"]
