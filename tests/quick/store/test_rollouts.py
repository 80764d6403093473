"""Stored rollouts: each message once, without tokens, compressed, and within a limit."""

import json
from pathlib import Path
from typing import Any

from art_protocol.history import pack_rows, read_row, read_rows, trajectory_row, without_texts
from art_protocol.wire import TrajectoryGroupBody
from art_server.store.model_folder import ModelFolder
from tests.makers.teacher_tops import teacher_top


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def choice(text: str, **fields: Any) -> dict[str, Any]:
    mark = {"id": text, "step": 1, "num_tokens": 2}
    message = {"role": "assistant", "content": text}
    return {"index": 0, "finish_reason": "stop", "message": message, "art": mark, **fields}


TOKENS = {"token_ids": [1], "prompt_token_ids": [2], "logprobs": {"content": []}}


def group(*histories: list[dict[str, Any]]) -> TrajectoryGroupBody:
    own, *others = histories
    additional = [{"messages_and_choices": history, "tools": [{"t": 1}]} for history in others]
    trajectory = {"messages_and_choices": own, "reward": 1.0, "additional_histories": additional}
    return TrajectoryGroupBody.model_validate({"trajectories": [trajectory]})


def stored_entries(body: TrajectoryGroupBody) -> list[int]:
    """The number of stored entries of each history."""
    (trajectory,) = trajectory_row(body)["trajectories"]
    others = trajectory["additional_histories"]
    return [len(trajectory["messages"]), *(len(history["messages_and_choices"]) for history in others)]


def read_again(body: TrajectoryGroupBody) -> list[list[dict[str, Any]]]:
    row = read_row(json.dumps(trajectory_row(body)))
    (trajectory,) = row["trajectories"]
    others = trajectory["additional_histories"]
    assert all(history["tools"] == [{"t": 1}] and "begins_with" not in history for history in others)
    return [trajectory["messages"], *(history["messages_and_choices"] for history in others)]


def test_choices_are_stored_without_tokens() -> None:
    whole = choice("a", **TOKENS, by_reference=True, stop_reason=None)
    ((message, stored),) = read_again(group([user("q"), whole]))
    assert message == user("q") and stored == choice("a", stop_reason=None)


def test_a_teacher_s_log_probabilities_are_not_stored() -> None:
    taught = {"messages_and_choices": [user("q"), choice("a")], "turn_targets": [teacher_top([[1]], [[-1]])]}
    body = TrajectoryGroupBody.model_validate(
        {"trajectories": [taught | {"reward": 1.0, "additional_histories": [taught]}]}
    )
    assert "turn_targets" not in json.dumps(trajectory_row(body))
    assert without_texts(body).trajectories[0].turn_targets is None


def test_what_conversations_share_is_stored_once() -> None:
    shared = [user("q"), choice("a"), user("r")]
    first, second = [*shared, choice("b")], [*shared, choice("c"), user("s"), choice("d")]
    third = [*second[:5], choice("e")]
    other = [user("another"), *shared]
    body = group(first, second, third, other, first)
    assert stored_entries(body) == [4, 3, 1, 4, 0]
    assert read_again(body) == [first, second, third, other, first]


def test_a_trajectory_grows_with_its_conversation_and_not_with_its_square() -> None:
    """An agent whose every turn is a conversation of its own."""

    def size(turns: int) -> int:
        entries = [entry for n in range(turns) for entry in (user(f"q{n}"), choice(f"a{n}"))]
        histories = [[*entries[: 2 * n], user("now"), choice(f"b{n}")] for n in range(turns)]
        return sum(stored_entries(group(entries, *histories)))

    assert [size(turns) for turns in (10, 20, 40)] == [40, 80, 160]


def test_a_place_that_cannot_be_is_left_out() -> None:
    for begins_with in (None, 7, {"history": 5, "entries": 1}, {"history": "x", "entries": 1}, {}):
        history = {"messages_and_choices": [user("r")], "begins_with": begins_with}
        row = {"trajectories": [{"messages": [user("q")], "additional_histories": [history]}]}
        (trajectory,) = read_row(json.dumps(row))["trajectories"]
        assert trajectory["additional_histories"][0]["messages_and_choices"] == [user("r")]
    for odd in (3, None, [], {"trajectories": 3}, {"trajectories": [3]}):
        assert read_row(json.dumps(odd)) == odd


def test_the_rollouts_of_a_step_are_replaced(tmp_path: Path) -> None:
    folder = ModelFolder(tmp_path, "p", "a")
    for text in ("old", "new"):
        folder.write_lines("val", 3, pack_rows(map(trajectory_row, [group([choice(text)])])))
        (row,) = read_rows(folder.trajectories_file("val", 3))
        assert row["trajectories"][0]["messages"][0]["message"]["content"] == text
    assert folder.rollout_steps("val") == [3] and folder.rollout_steps("train") == []


def test_the_oldest_rollouts_are_deleted_above_the_limit(tmp_path: Path) -> None:
    folder = ModelFolder(tmp_path, "p", "a")
    for step in range(1, 5):
        folder.write_lines("train", step, bytes(100))
        folder.tokens_file(step).parent.mkdir(exist_ok=True)
        folder.tokens_file(step).write_bytes(bytes(900))
    folder.write_lines("val", 2, bytes(100))
    assert folder.prune_rollouts(4100) == 0
    assert folder.prune_rollouts(4099) == 2
    assert folder.rollout_steps("train") == [2, 3, 4] and not folder.tokens_file(1).exists()
    assert folder.prune_rollouts(1000) == 5
    assert (folder.rollout_steps("train"), folder.rollout_steps("val")) == ([4], [])
    assert folder.prune_rollouts(1) == 0, "the newest step keeps its own"
