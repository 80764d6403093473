import base64
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_protocol.wire import TeacherTop, TrainConfig, TrajectoryGroupBody
from art_server.errors import InvalidInput, RecordsMissing
from art_server.jobs.job_report import CUT, EQUAL, FAILED, NO_TURN
from art_server.jobs.reasons import AMBIGUOUS, NO_RECORD, NO_TOKENS, TWICE
from art_server.jobs.turns import ResolvedTurn, TurnSignal, UnusableTurn, join_turns, with_signal
from art_server.ledger import conversation
from art_server.ledger.records import Record
from art_server.shared.advantages import trained_tokens
from art_server.shared.kept_set import pack_set, unpack_set
from art_server.shared.trainer_messages import Batch, Distribution, TokenSequence
from tests.makers.resolving import LIMITS, bare, choice, record, resolve, sources
from tests.makers.teacher_tops import teacher_top
from tests.refusals import refused


def of_groups(report: Any) -> list[str]:
    """A report's notes, without that on carried tokens that have no record, and without advice (`test_advice.py`)."""
    return [note for note in report.notes if "tokens came with their choices" not in note and " groups: " not in note]


def found_in(records: list[Record]) -> dict[str, Any]:
    """Sources of a ledger in which all records have the log-probabilities that are asked for."""

    def find(prefix: bytes, answer: bytes) -> list[Record]:
        digests = (prefix, answer)
        return [r for r in records if (r.request.prefix_digest, r.answer_digest) == digests]

    return {"find_by_logprobs": lambda logprobs: records, "find_by_conversation": find}


def run(
    trajectories: list[list[dict[str, Any]]],
    rewards: list[float] | None = None,
    find: Callable[[str], Record | None] = lambda _: None,
    histories: list[list[dict[str, Any]]] | None = None,
    config: TrainConfig | None = None,
    overrides: dict[str, Any] | None = None,
    **group: Any,
) -> tuple[Batch, Any]:
    bodies = [
        {"messages_and_choices": entries, "reward": reward}
        for entries, reward in zip(trajectories, rewards or range(len(trajectories)), strict=True)
    ]
    if histories:
        bodies[0]["additional_histories"] = [{"messages_and_choices": h} for h in histories]
    body = TrajectoryGroupBody.model_validate({"trajectories": bodies, **group})
    known = sources(find_record=find, **(overrides or {}))
    resolved = resolve([body], config or TrainConfig(), "p/a", known, LIMITS)
    return resolved.batch, resolved.report


def test_a_choice_is_trained_on_the_tokens_that_it_carries() -> None:
    batch, report = run([[{"role": "user", "content": "q"}, choice([1, 2], [3, 4])]])
    (row,) = batch.groups[0].trajectories[0].sequences
    assert row.token_ids == [1, 2, 3, 4]
    assert report.turns == {"ids": 1}


def test_a_carried_choice_without_its_record_has_unknown_log_probabilities() -> None:
    """Its settings are unknown: it may have been sampled at any temperature, or with top_p."""
    claimed = choice([1, 2], [3, 4], "gone")
    claimed["art"]["step"] = 7
    entries = [[claimed], [choice([1], [2])]]
    batch, report = run(entries)
    first, second = (t.sequences[0] for t in batch.groups[0].trajectories)
    assert (first.logprobs, first.recompute) == ([None] * 4, [2, 3])
    assert (second.logprobs, second.recompute) == ([None] * 2, [1])
    assert report.num_tokens_without_logprob == 3
    (note,) = report.notes
    assert note.startswith("3 tokens came with their choices") and "ratio 1" in note
    # What the choice says about its step limits the staleness; it is no knowledge.
    assert [(span.start, span.stop, span.step) for span in first.spans] == [(2, 4, 7)]
    assert second.spans == [] and report.sampled_steps == {}
    raw, report = run(entries, config=TrainConfig(sampling="raw"))
    assert raw.groups[0].trajectories[0].sequences[0].logprobs == [None, None, -0.03, -0.04]
    assert "temperature 1" in report.notes[0]


@pytest.mark.parametrize("step", [-1, 2**40, True, "7", None, 7.0])
def test_a_step_that_is_none_is_not_believed(step: Any) -> None:
    claimed = choice([1, 2], [3, 4], "gone")
    claimed["art"]["step"] = step
    batch, _ = run([[claimed], [choice([1], [2])]])
    assert batch.groups[0].trajectories[0].sequences[0].spans == []


def test_a_carried_choice_without_an_id_takes_the_figures_of_its_record() -> None:
    records = [record("c-0", [1], [3, 4]), record("c-1", [1, 2], [3, 4])]
    sampled = [dataclasses.replace(plain, sampled_logprobs=[-0.7, -0.8]) for plain in records]
    entries = [[choice([1, 2], [3, 4])], [choice([9], [3, 4])]]
    batch, report = run(entries, overrides=found_in(sampled))
    first, second = (t.sequences[0].logprobs for t in batch.groups[0].trajectories)
    assert first == [None, None, -0.7, -0.8]
    assert second == [None] * 3, "the same answer to another prompt"
    assert report.turns == {"ids": 2}


# --- by reference ---------------------------------------------------------------------------------------------------


def referred(identity: str, **mark: Any) -> dict[str, Any]:
    """A choice whose client has its tokens and did not send them."""
    return bare(identity, **mark) | {"by_reference": True}


def test_a_choice_by_reference_trains_what_the_whole_choice_trains() -> None:
    def find(key: str) -> Record:
        prompt = {"c-0": [1, 2], "c-1": [1, 2, 3, 4, 5]}[key]
        return record(key, prompt, {"c-0": [3, 4], "c-1": [6]}[key])

    whole = [choice([1, 2], [3, 4], "c-0"), choice([1, 2, 3, 4, 5], [6], "c-1")]
    one, _ = run([whole], find=find)
    other, report = run([[referred("c-0"), referred("c-1")]], find=find)
    assert one == other
    assert report.turns == {"ledger": 2} and report.continuations == {"joined": 1}


def test_missing_records_are_named_before_anything_is_trained() -> None:
    entries = [
        [referred("c-0"), referred("gone-1")],
        [bare("gone-2")],
        [referred("gone-3", model="p/b")],
    ]
    with refused(RecordsMissing, "records_missing", "groups") as caught:
        run(entries, find=lambda key: record(key, [1], [2]) if key == "c-0" else None)
    assert caught.value.ids == ["gone-1"]
    # Those whose clients have no tokens are dropped and named; those of another model need no record.
    whole = choice([1, 2, 3], [4], "gone-1")
    _, report = run(
        [[referred("c-0"), whole], *entries[1:]],
        find=lambda key: record(key, [1], [2]) if key == "c-0" else None,
    )
    assert report.turns == {"ledger": 1, "ids": 1}
    reasons = [dropped.reason for dropped in report.dropped]
    assert NO_RECORD in reasons and any("'p/b'" in reason for reason in reasons)


def test_a_record_of_another_project_is_missing() -> None:
    def find(key: str) -> Record:
        own = record(key, [1], [2])
        return dataclasses.replace(own, request=dataclasses.replace(own.request, model=9, owner="other"))

    with pytest.raises(RecordsMissing):
        run([[referred("c-0")]], find=find)


def test_demonstrations_by_reference_without_a_record_are_sent_whole_too() -> None:
    config = TrainConfig(allow_training_without_logprobs=True)
    with pytest.raises(RecordsMissing):
        run([[QUESTION, referred("gone")]], config=config)
    _, report = run([[QUESTION, bare("gone")]], config=config)
    assert report.turns == {"recomputed": 1}


def test_a_choice_without_tokens_is_found_in_the_ledger() -> None:
    batch, report = run([[bare("c-0")]], find=lambda key: record(key, [5], [6, 7]))
    assert batch.groups[0].trajectories[0].sequences[0].token_ids == [5, 6, 7]
    assert report.turns == {"ledger": 1}


def test_tokens_without_matching_log_probabilities_come_from_the_ledger() -> None:
    carried = choice([1], [2, 3], "c-0")
    carried["logprobs"]["content"].pop()
    batch, _ = run([[carried]], find=lambda key: record(key, [5], [6]))
    assert batch.groups[0].trajectories[0].sequences[0].token_ids == [5, 6]


def test_a_continued_conversation_is_one_row_and_a_rewritten_one_two() -> None:
    first, second = choice([1, 2], [3, 4]), choice([1, 2, 3, 4, 5], [6])
    batch, _ = run([[first, second]])
    (row,) = batch.groups[0].trajectories[0].sequences
    assert row.token_ids == [1, 2, 3, 4, 5, 6]
    assert row.recompute == [2, 3, 5]
    stripped = choice([1, 2, 4, 5], [6])
    rows = run([[first, stripped]])[0].groups[0].trajectories[0].sequences
    assert [row.token_ids for row in rows] == [[1, 2, 3, 4], [1, 2, 4, 5, 6]]


def test_additional_histories_share_the_trajectory() -> None:
    batch, _ = run([[choice([1], [2])]], histories=[[choice([7], [8])]])
    assert [r.token_ids for r in batch.groups[0].trajectories[0].sequences] == [[1, 2], [7, 8]]


def test_a_choice_that_stands_twice_is_trained_once() -> None:
    one = choice([1], [2], "c-0")
    _, report = run([[one]], histories=[[one]])
    assert report.turns == {"ids": 1}
    assert report.dropped[0].reason == TWICE


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (choice([1], [100]), "vocabulary"),
        (choice([-1], [2]), "vocabulary"),
        (choice([1] * 50, [2]), "context"),
        (choice([], [2]), "empty"),
        (choice([1], [2], "c-0", model="p/b"), "'p/b'"),
        (bare("unknown"), NO_RECORD),
        ({"message": {"content": "x"}, "finish_reason": "stop"}, NO_TOKENS),
    ],
)
def test_turns_that_cannot_be_trained_are_counted_with_a_reason(entry: dict[str, Any], why: str) -> None:
    _, report = run([[choice([1], [2])], [entry]])
    reasons = {dropped.reason: dropped for dropped in report.dropped}
    (reason,) = [reason for reason in reasons if why in reason]
    assert reasons[reason].examples == ["groups[0].trajectories[1].messages_and_choices[0]"]


def test_a_record_of_another_model_is_not_trained() -> None:
    with refused(InvalidInput, "no_trainable_turn", "groups"):
        run([[bare("c-0")]], find=lambda key: record(key, [1], [2], name="b"))


def test_a_log_probability_that_is_not_one_is_refused() -> None:
    bad = choice([1], [2])
    bad["logprobs"]["content"][0]["logprob"] = float("nan")
    with refused(InvalidInput, "no_trainable_turn", "groups"):
        run([[bad]])


def test_rewards_that_only_the_penalty_for_length_tells_apart_are_a_signal() -> None:
    penalty = TrainConfig(overlong="soft_penalty", overlong_length=2, overlong_buffer=1)
    _, report = run([[choice([1], [2])], [choice([1], [3, 4])]], [1.0, 1.0], config=penalty)
    assert (report.num_groups_trained, report.dropped) == (1, [])


def test_equal_rewards_and_failures_are_counted() -> None:
    failure = {"type": "ValueError", "message": "no"}
    batch, report = run([[choice([1], [2])], [choice([1], [3])]], [1.0, 1.0], exceptions=[failure])
    assert len(batch.groups) == 1
    assert (report.num_groups, report.num_groups_trained, report.num_failed_rollouts) == (1, 0, 1)
    assert {dropped.count for dropped in report.dropped} == {1}


UNTRAINED: list[tuple[list[list[dict[str, Any]]], dict[str, Any], list[tuple[str, int, int]]]] = [
    ([[choice([1], [2, 4])], [choice([1], [3])]], {"rewards": [1.0, 1.0]}, [(EQUAL, 2, 3)]),
    ([[choice([1], [2])], [choice([1], [3])], [{"role": "user", "content": "q"}]], {}, [(NO_TURN, 1, 0)]),
    (
        [[choice([1], [2])], [choice([1], [3])], [choice([1], [4, 5]) | {"finish_reason": "length"}]],
        {"config": TrainConfig(overlong="mask")},
        [(CUT, 1, 2)],
    ),
    (
        [[choice([1], [2])], [choice([1], [3])]],
        {"exceptions": [{"type": "ValueError", "message": "no"}]},
        [(FAILED, 1, 0)],
    ),
]
"""Trajectories, the rest of a request, and the rollouts of which nothing is trained: reason, number, sampled tokens."""


@pytest.mark.parametrize(("trajectories", "more", "unused"), UNTRAINED)
def test_rollouts_that_train_nothing_are_counted_once_each(
    trajectories: list[list[dict[str, Any]]], more: dict[str, Any], unused: list[tuple[str, int, int]]
) -> None:
    _, report = run(trajectories, **more)
    assert [(entry.reason, entry.num_rollouts, entry.num_tokens) for entry in report.unused] == unused
    assert report.num_trajectories_trained + sum(num for _, num, _ in unused) == (
        report.num_trajectories + report.num_failed_rollouts
    )
    assert report.num_sampled_tokens == report.num_trained_tokens + sum(tokens for *_, tokens in unused)


def said_choice(text: str, logprobs: list[float] | None = None) -> dict[str, Any]:
    """A choice as an agent that keeps no ids sends it."""
    body: dict[str, Any] = {
        "message": {"role": "assistant", "content": text},
        "finish_reason": "stop",
    }
    if logprobs is not None:
        entries = [{"token": "w", "logprob": value} for value in logprobs]
        body["logprobs"] = {"content": entries}
    return body


QUESTION = {"role": "user", "content": "say yes"}
BEFORE = conversation.prefix_digests([QUESTION])[-1]


def test_equal_short_answers_get_a_record_each() -> None:
    """Text only: found by the conversation and the words, each record once, as long as there are enough."""
    records = [dataclasses.replace(record(f"c-{i}", [5], [6, 7], prefix=BEFORE), logprobs=[-1.0, -i]) for i in range(3)]
    batch, report = run([[QUESTION, said_choice("yes")]] * 4, overrides=found_in(records))
    last_logprobs = [t.sequences[0].logprobs[-1] for t in batch.groups[0].trajectories]
    assert last_logprobs == [0, -1, -2, 0]
    assert report.turns == {"ledger": 4}


def test_a_choice_whose_record_is_missing_does_not_take_a_sibling_s() -> None:
    """Both say the same, with other thinking that the digests leave out."""
    sibling = record("c-1", [5], [6, 7], prefix=BEFORE)
    lost = {**said_choice("yes"), "art": {"id": "c-0", "model": "p/a", "unrecorded": "a full disk"}}
    kept = {**said_choice("yes"), "art": {"id": "c-1", "model": "p/a"}}
    batch, report = run(
        [[QUESTION, lost], [QUESTION, kept]],
        find={"c-1": sibling}.get,
        overrides=found_in([sibling]),
    )
    assert [len(t.sequences) for t in batch.groups[0].trajectories] == [0, 1]
    assert "not in the ledger" in report.dropped[0].reason
    own = {**lost, "logprobs": said_choice("yes", [-0.5, -0.5])["logprobs"]}
    batch, _ = run([[QUESTION, own]], overrides=found_in([sibling]))
    assert batch.groups[0].trajectories[0].sequences[0].token_ids == [5, 6, 7]


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_words_with_thinking_find_the_sample_of_that_thinking(field: str) -> None:
    texts = {(6, 8): "<think>\none\n</think>\nyes", (7, 8): "<think>\ntwo</think>yes"}
    records = [record(f"c-{i}", [5], list(tokens), prefix=BEFORE) for i, tokens in enumerate(texts)]
    overrides = {**found_in(records), "decode": lambda tokens: texts[tuple(tokens)]}

    def thought(text: str) -> list[dict[str, Any]]:
        answer = said_choice("yes")
        answer["message"][field] = text
        return [QUESTION, answer]

    batch, report = run([thought("two"), thought("one"), thought("three")], overrides=overrides)
    token_ids = [[s.token_ids for s in t.sequences] for t in batch.groups[0].trajectories]
    assert token_ids == [[[5, 7, 8]], [[5, 6, 8]], []]
    assert "not in the ledger" in report.dropped[0].reason


def test_words_without_log_probabilities_count_only_in_their_conversation() -> None:
    elsewhere = record("c-0", [5], [6], prefix=conversation.prefix_digests([{"role": "user"}])[-1])
    with refused(InvalidInput, "no_trainable_turn", "groups") as caught:
        run([[QUESTION, said_choice("yes")]], overrides=found_in([elsewhere]))
    assert NO_TOKENS in caught.value.message
    batch, _ = run([[QUESTION, said_choice("yes", [-0.5])]], overrides=found_in([elsewhere]))
    assert batch.groups[0].trajectories[0].sequences[0].token_ids == [5, 6]


def test_a_choice_whose_tool_call_was_dropped_is_found_by_its_log_probabilities() -> None:
    """As NVIDIA's plugin sends a tool episode: no content, no calls, the tool's result as an assistant's message."""
    call = record("c-0", [5], [6, 7], prefix=BEFORE, text='{"name": "add", "arguments": {}}')
    answer = record("c-1", [5, 6, 7, 8], [9], text="it is 42")
    entries = [
        QUESTION,
        said_choice("", [-0.5, -0.5]),
        {"role": "assistant", "content": "42"},
        said_choice("it is 42", [-0.5]),
    ]

    overrides = {"find_by_logprobs": lambda logprobs: [call] if len(logprobs) == 2 else [answer]}
    batch, report = run([entries], overrides=overrides)
    (row,) = batch.groups[0].trajectories[0].sequences
    assert row.token_ids == [5, 6, 7, 8, 9]
    assert [value is not None for value in row.logprobs] == [False, True, True, False, True]
    assert report.turns == {"ledger": 2}


def test_log_probabilities_that_stand_for_several_texts_name_none_of_them() -> None:
    elsewhere = [record("c-0", [5], [6]), record("c-1", [5], [7])]
    overrides = {"find_by_logprobs": lambda logprobs: elsewhere}
    with refused(InvalidInput, "no_trainable_turn", "groups") as caught:
        run([[QUESTION, said_choice("", [-0.0] * 3)]], overrides=overrides)
    assert AMBIGUOUS in caught.value.message
    elsewhere.append(record("c-2", [5], [8], prefix=BEFORE))
    batch, _ = run([[QUESTION, said_choice("", [-0.0] * 3)]], overrides=overrides)
    assert batch.groups[0].trajectories[0].sequences[0].token_ids == [5, 8]


def test_a_choice_with_log_probabilities_and_no_ids_is_not_tokenised_again() -> None:
    """Its text may split into other tokens than those that were sampled."""
    _, report = run([[choice([1], [2])], [QUESTION, said_choice("yes or", [-0.1, -0.2, -0.3])]])
    assert report.turns == {"ids": 1} and "carries no token ids" in report.dropped[0].reason


def test_a_conversation_that_the_template_refuses_is_one_dropped_turn() -> None:
    def refuse(*_: Any) -> list[int]:
        raise InvalidInput("roles must alternate", code="cannot_render")

    entries = [QUESTION, said_choice("one two")]
    config = TrainConfig(allow_training_without_logprobs=True)
    _, report = run([[choice([1], [2])], entries], overrides={"render": refuse}, config=config)
    assert report.turns == {"ids": 1} and "roles must alternate" in report.dropped[0].reason
    assert report.dropped[0].examples == ["groups[0].trajectories[1].messages_and_choices[1]"]


def test_plain_messages_train_only_on_request() -> None:
    entries = [QUESTION, {"role": "assistant", "content": "yes"}]
    with pytest.raises(InvalidInput):
        run([entries])
    batch, report = run([entries], config=TrainConfig(allow_training_without_logprobs=True))
    (row,) = batch.groups[0].trajectories[0].sequences
    assert (row.token_ids, row.recompute) == ([11, 23, 99], [1, 2])
    assert report.turns == {"recomputed": 1}


@pytest.mark.parametrize("config", [TrainConfig(), TrainConfig(allow_training_without_logprobs=True)])
def test_a_turn_that_saw_an_image_is_not_trained(config: TrainConfig) -> None:
    """Its tokens would be trained without the image. Those before the image are."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    entries = [
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        choice([1], [2], "c-0"),
        {"role": "user", "content": [{"type": "text", "text": "and this?"}, picture]},
        choice([1, 2, 3], [4], "c-1"),
        said_choice("yes"),
    ]
    batch, report = run([entries], config=config)
    (row,) = batch.groups[0].trajectories[0].sequences
    assert row.token_ids == [1, 2]
    assert [(dropped.reason, dropped.count) for dropped in report.dropped[:1]] == [
        ("the conversation contains a part of type 'image_url': only text can be trained", 2)
    ]


def test_why_a_turn_could_not_be_joined_is_counted() -> None:
    first, second = choice([1, 2], [3, 4], "c-0"), choice([1, 2, 4, 5], [6], "c-1")
    dropped = dataclasses.replace(record("c-1", [1, 2, 4, 5], [6]), link="dropped")
    _, report = run([[first, second]], find=lambda key: dropped if key == "c-1" else None)
    assert report.continuations == {"dropped": 1}
    _, report = run([[first, choice([1, 2, 3, 4, 5], [6], "c-2"), choice([9], [9], "c-3")]])
    assert report.continuations == {"joined": 1, "changed": 1}


def letters(token_ids: Sequence[int]) -> str:
    return "".join(chr(96 + token) for token in token_ids)


def test_a_turn_that_begins_a_new_sequence_says_which_text_differs() -> None:
    """The tokens are letters: of a system and a user message, an answer with its end, a tool message."""
    overrides = {"decode": letters}
    opening = [{"role": "system", "content": "ab"}, {"role": "user", "content": "cd"}]
    first, tool = choice([1, 2, 3, 4], [5, 6, 26], "c-0"), {"role": "tool", "content": "gh"}
    cases = [
        ([1, 2, 3, 4, 5, 6, 9, 26, 7, 8], "the policy's answer"),  # text before its end
        ([1, 2, 3, 4, 5, 9, 26, 7, 8], "the policy's answer"),
        ([1, 2, 3, 9, 5, 6, 26, 7, 8], "the user message"),
        ([9, 2, 3, 4, 5, 6, 26, 7, 8], "the system message"),
        ([1, 2], "the user message"),
    ]
    for prompt, whose in cases:
        second = choice(prompt, [10], "c-1")
        _, report = run([[*opening, first, tool, second]] * 3, overrides=overrides)
        (difference,) = report.differences
        assert report.continuations == {"changed": 3}
        assert (difference.whose, difference.count) == (whose, 3)
        assert (difference.expected, difference.found) == ("abcdefz", letters(prompt))
        assert difference.example == "groups[0].trajectories[0].messages_and_choices[4]"
    # The tool's message is behind an answer.
    third = choice([1, 2, 3, 4, 5, 6, 26, 9, 10], [11], "c-2")
    second = choice([1, 2, 3, 4, 5, 6, 26, 7, 8], [10], "c-1")
    _, report = run([[*opening, first, tool, second, third]], overrides=overrides)
    assert report.continuations == {"joined": 1, "changed": 1}
    assert [difference.whose for difference in report.differences] == ["the tool message"]
    # What stands behind whole messages is the template's.
    second, third = choice([1, 2, 3, 4, 9, 9], [5, 26], "c-1"), choice([1, 2, 3, 4, 9, 5, 26], [10], "c-2")
    _, report = run([[*opening, second, tool, third]], overrides=overrides)
    assert [difference.whose for difference in report.differences] == ["the chat template's own text"]


def test_histories_that_repeat_answers_without_continuing_them_say_why() -> None:
    """As an agent makes them that sends its answers back with more text: three conversations a rollout, nothing shared."""
    user = {"role": "user", "content": "q"}

    def answered(text: str, tokens: list[int], identity: str) -> dict[str, Any]:
        body = choice([1], tokens, identity)
        return {**body, "message": {"role": "assistant", "content": text}}

    def repeated(text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": f"{text}</code>"}

    one, two, three = answered("one", [2], "c-0"), answered("two", [3], "c-1"), answered("three", [4], "c-2")
    histories = [
        [user, repeated("one"), user, two],
        [user, repeated("one"), user, repeated("two"), user, three],
    ]
    _, report = run([[user, one], [user, choice([1], [9], "c-9")]], histories=histories)
    assert report.continuations == {"changed": 2}
    (difference,) = report.differences  # the first of the rollout
    assert (difference.whose, difference.expected, difference.found) == ("the policy's answer", "one", "one</code>")
    assert difference.example == "groups[0].trajectories[0].additional_histories[0].messages_and_choices[3]"
    # The longest conversation comes first in a session's trajectory, whenever it began.
    _, report = run([[*histories[1]], [user, choice([1], [9], "c-9")]], histories=[[user, one], histories[0]])
    assert report.continuations == {"changed": 2}
    assert [difference.whose for difference in report.differences] == ["the policy's answer"]
    # A branch continues an answer; neither a sub-agent nor an example of the prompt is an answer that was not continued.
    branch = [user, one, {"role": "user", "content": "another"}, choice([1, 2, 8], [9], "c-8")]
    _, report = run(
        [[user, one, user, choice([1, 2], [3], "c-7")], [user, choice([1], [9], "c-9")]], histories=[branch]
    )
    assert report.continuations == {"joined": 1} and report.differences == []
    sub = [{"role": "system", "content": "sub"}, user, repeated("an example"), user]
    histories = [[*sub, two], [*sub, three]]
    _, report = run([[user, one], [user, choice([1], [9], "c-9")]], histories=histories)
    assert report.continuations == {} and report.differences == []


token_lists = st.lists(st.integers(0, 5), min_size=1, max_size=4)


@given(st.lists(st.tuples(token_lists, token_lists, st.booleans()), min_size=1, max_size=6))
def test_every_sampled_token_is_trained_once_after_its_own_prompt(
    steps: list[tuple[list[int], list[int], bool]],
) -> None:
    """Whatever the conversation does, rows hold each turn's tokens right behind exactly its prompt."""
    turns: list[ResolvedTurn] = []
    so_far: list[int] = []
    for context, tokens, goes_on in steps:
        prompt = so_far + context if goes_on else context
        turns.append(ResolvedTurn(prompt, tokens, [-float(i + 1) for i in range(len(tokens))], "ids"))
        so_far = prompt + tokens
    rows, _ = join_turns(turns)
    trained = sum(value is not None for row in rows for value in row.logprobs)
    assert trained == sum(len(turn.token_ids) for turn in turns)
    texts = [row.token_ids for row in rows]
    for turn in turns:
        whole = turn.prompt_token_ids + turn.token_ids
        assert any(text[: len(whole)] == whole for text in texts)
    for row in rows:
        assert len(row.token_ids) == len(row.logprobs) and row.logprobs[0] is None


def test_turns_may_have_rewards_and_advantages_of_their_own() -> None:
    first, second = choice([1, 2], [3, 4]), choice([1, 2, 3, 4, 5], [6])
    body = {"messages_and_choices": [first, second], "reward": 1.0}
    signal = {"turn_rewards": [0.5, None], "turn_advantages": [[0.1, 0.2], 3]}
    history = {"messages_and_choices": [choice([7], [8])], "turn_rewards": [2.0]}

    def rows_of(**fields: Any) -> Any:
        trajectory = body | fields | {"additional_histories": [history]}
        group = TrajectoryGroupBody.model_validate({"trajectories": [trajectory]})
        resolved = resolve([group], TrainConfig(), "p/a", sources(), LIMITS)
        return resolved.batch, resolved.report

    batch, report = rows_of(**signal)
    row, other = batch.groups[0].trajectories[0].sequences
    assert row.rewards == [(3, 0.5)] and row.advantages == {2: 0.1, 3: 0.2, 5: 3.0}
    assert other.rewards == [(1, 2.0)]
    assert report.num_groups_trained == 1, "one trajectory, but its turns say what is better"
    with refused(InvalidInput, "bad_turns", "groups[0].trajectories[0].turn_rewards"):
        rows_of(turn_rewards=[1.0])
    batch, report = rows_of(turn_advantages=[[1.0], None])
    assert report.dropped[0].count == 1


def resolved_targets(*targets: Any, distributions: Any = None, **config: Any) -> Any:
    """A trajectory of the two turns [3, 4] and [6] with these targets."""
    entries = [choice([1, 2], [3, 4]), choice([1, 2, 3, 4, 5], [6])]
    body = {"messages_and_choices": entries, "reward": 0.0, "turn_targets": list(targets)}
    group = TrajectoryGroupBody.model_validate({"trajectories": [body]})
    return resolve([group], TrainConfig(**config), "p/a", sources(), LIMITS)


def test_targets_of_a_teacher_reach_the_tokens_of_their_turn() -> None:
    first, second = teacher_top([[1, 2], [3, 4]], [[-1, -2], [-0.5, -1]]), teacher_top([[6, 0]], [[-0.1, -3]])
    resolved = resolved_targets(first, second)
    (row,) = resolved.batch.groups[0].trajectories[0].sequences
    assert [(span.start, span.stop, span.top) for span in row.taught] == [(2, 4, first), (5, 6, second)]
    assert resolved.report.num_groups_trained == 1, "targets are something to learn from, with equal rewards, too"
    assert TokenSequence.model_validate_json(row.model_dump_json()) == row
    (row,) = resolved_targets(None, second).batch.groups[0].trajectories[0].sequences
    assert [span.start for span in row.taught] == [5]


ONE_TOKEN = teacher_top([[1, 2]], [[-1, -2]])


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (teacher_top([[1, LIMITS.vocab_size], [1, 2]], [[-1, -2]] * 2), "outside the model's vocabulary"),
        (teacher_top([[1, -1], [1, 2]], [[-1, -2]] * 2), "outside the model's vocabulary"),
        (teacher_top([[1, 1], [1, 2]], [[-1, -2]] * 2), "an id twice"),
        (teacher_top([[1, 2]] * 2, [[-1, 0.5]] * 2), "above 0"),
        (teacher_top([[1, 2]] * 2, [[-1, math.nan]] * 2), "not finite"),
        (teacher_top([[1, 2]] * 2, [[-0.1, -0.2]] * 2), "sum above 1"),
        (teacher_top([[1, 2]] * 2, [[-1, -2]]), "token_ids has 2 tokens, and logprobs has 1"),
        (TeacherTop(top_k=2, token_ids="*", logprobs=""), "not base64"),
        (TeacherTop(top_k=3, token_ids="AAAA", logprobs=""), "no multiple of 4 x top_k"),
        (teacher_top([[1], [1]], [[-1], [-1]]), "top_k is 1, and 2 in an earlier turn"),
    ],
)
def test_targets_that_are_no_distribution_are_refused(target: TeacherTop, words: str) -> None:
    good = teacher_top([[1, 2]] * 2, [[-1, -2]] * 2)
    with pytest.raises(InvalidInput, match=words) as refusal:
        if "earlier" in words:
            resolved_targets(good, target)
        else:
            resolved_targets(target, None)
    assert (refusal.value.code, str(refusal.value.param).startswith("groups[0].trajectories[0].turn_targets[")) == (
        "bad_targets",
        True,
    )


def test_targets_need_the_policy_s_objective_and_the_turn_s_tokens() -> None:
    with refused(InvalidInput, "bad_targets", "groups[0].trajectories[0].turn_targets[1]"):
        resolved_targets(None, ONE_TOKEN, objective="likelihood")
    with refused(InvalidInput, "bad_turns", "groups[0].trajectories[0].turn_targets"):
        resolved_targets(ONE_TOKEN)
    report = resolved_targets(ONE_TOKEN, ONE_TOKEN).report
    assert [part.reason for part in report.dropped if "teacher" in part.reason] == [
        "a teacher's log-probabilities of 1 tokens were given for 2 sampled tokens"
    ]
    turn = ResolvedTurn([1], [2], [-1.0], "ledger", distributions=[Distribution(temperature=0.5)])
    with pytest.raises(UnusableTurn, match="sample at temperature 1"):
        with_signal(turn, TurnSignal(targets=ONE_TOKEN, num_targets=1))


def test_the_reward_of_a_dropped_turn_counts_for_the_turns_before_it() -> None:
    """Turn rewards 1 (dropped), 2, 4 (dropped), 3 and 5 (dropped) against 0 of the other trajectory."""
    gone = bare("unknown")
    entries = [gone, choice([1, 2], [3]), gone, choice([1, 2, 3, 4, 5], [6])]
    side = {"messages_and_choices": [gone], "turn_rewards": [5.0]}
    bodies = [
        {
            "messages_and_choices": entries,
            "reward": 0.0,
            "turn_rewards": [1.0, 2.0, 4.0, 3.0],
            "additional_histories": [side],
        },
        {"messages_and_choices": [choice([1, 2], [4])], "reward": 0.0, "turn_rewards": [0.0]},
    ]
    body = TrajectoryGroupBody.model_validate({"trajectories": bodies})
    config = TrainConfig(scaling="none")
    batch = resolve([body], config, "p/a", sources(), LIMITS).batch
    (row,) = batch.groups[0].trajectories[0].sequences
    assert row.rewards == [(0, 1.0), (2, 2.0), (3, 4.0), (5, 3.0), (6, 5.0)]
    (tokens,) = trained_tokens(batch.groups, config)
    assert tokens is not None
    # The mean is 2.5. The first token has the deviations of 2, 4, 3 and 5, the last one those of 3 and 5.
    assert tokens == [[[(2, 4.0), (5, 3.0)]], [[(2, -2.5)]]]


def test_each_dropped_turn_keeps_its_reward_where_several_have_one_position() -> None:
    """Behind the last tokens of two histories, and before a turn that has fewer tokens than there are such rewards."""
    gone = bare("unknown")
    body = {
        "messages_and_choices": [gone, gone, gone, choice([1], [2]), gone],
        "reward": 0.0,
        "turn_rewards": [1.0, 2.0, 3.0, 4.0, 5.0],
        "additional_histories": [{"messages_and_choices": [gone, gone], "turn_rewards": [6.0, 7.0]}],
    }
    group = TrajectoryGroupBody.model_validate({"trajectories": [body]})
    batch = resolve([group], TrainConfig(scaling="none"), "p/a", sources(), LIMITS).batch
    (row,) = batch.groups[0].trajectories[0].sequences
    assert row.rewards == [(0, 1.0), (0, 2.0), (0, 3.0), (1, 4.0), (2, 5.0), (2, 6.0), (2, 7.0)]
    # The mean is 4. The token has the deviations of 4 and of all behind it.
    assert trained_tokens(batch.groups, TrainConfig(scaling="none")) == [[[[(1, 0.0 + 1.0 + 2.0 + 3.0)]]]]


def test_rewards_of_turns_in_a_job_of_an_earlier_version_are_read() -> None:
    stored = '{"token_ids": [1, 2], "logprobs": [null, -1.0], "rewards": {"1": 0.5}}'
    sequence = TokenSequence.model_validate_json(stored)
    assert sequence.rewards == [(1, 0.5)]
    assert TokenSequence.model_validate_json(sequence.model_dump_json()) == sequence


MAIN_AND_SUB_AGENT = [
    # name, prompt, tokens, time of the request, reward: the sub-agent works between the main agent's turns
    [("m1", [1], [2], 10, 1.0), ("m2", [1, 2, 3], [4], 40, 8.0)],
    [("s1", [5], [6], 20, 2.0), ("s2", [5, 6, 7], [8], 30, 4.0)],
]


def rewards_to_go(histories: list[list[Any]]) -> dict[int, float]:
    """What a trajectory's rewards of turns give each sampled token, by the token."""
    records = {
        name: dataclasses.replace(
            known := record(name, prompt, tokens),
            request=dataclasses.replace(known.request, requested_at=at),
        )
        for history in histories
        for name, prompt, tokens, at, _ in history
    }
    bodies: list[dict[str, Any]] = [
        {
            "messages_and_choices": [bare(name) for name, *_ in history],
            "turn_rewards": [reward for *_, reward in history],
        }
        for history in histories
    ]
    body = bodies[0] | {"reward": 0.0, "additional_histories": bodies[1:]}
    group = TrajectoryGroupBody.model_validate({"trajectories": [body]})
    config = TrainConfig(scaling="none", baseline="none")
    batch = resolve([group], config, "p/a", sources(find_record=records.get), LIMITS).batch
    (tokens,) = trained_tokens(batch.groups, config)
    assert tokens is not None
    return {
        row.token_ids[position]: advantage
        for row, of_row in zip(batch.groups[0].trajectories[0].sequences, tokens[0], strict=True)
        for position, advantage in of_row
    }


def test_rewards_of_turns_count_for_the_turns_that_were_requested_before() -> None:
    expected = {2: 15.0, 6: 14.0, 8: 12.0, 4: 8.0}
    assert rewards_to_go(MAIN_AND_SUB_AGENT) == expected
    assert rewards_to_go(MAIN_AND_SUB_AGENT[::-1]) == expected, "however the histories are listed"


def test_without_the_time_of_each_request_histories_follow_each_other() -> None:
    main, sub = MAIN_AND_SUB_AGENT
    unknown = [(*turn[:3], None, turn[4]) for turn in sub]
    assert rewards_to_go([main, unknown]) == {2: 15.0, 4: 14.0, 6: 6.0, 8: 4.0}


def test_the_reward_of_a_dropped_last_turn_is_no_later_than_its_history() -> None:
    """The sub-agent's last turn is the base model's, before the main agent's second."""
    main, sub = MAIN_AND_SUB_AGENT
    records = {name: record(name, prompt, tokens) for name, prompt, tokens, *_ in (*main, *sub)}
    for name, _, _, at, _ in (*main, *sub):
        untimed = records[name]
        records[name] = dataclasses.replace(untimed, request=dataclasses.replace(untimed.request, requested_at=at))
    side = {
        "messages_and_choices": [*(bare(name) for name, *_ in sub), bare("x", model=None)],
        "turn_rewards": [2.0, 4.0, 16.0],
    }
    body = {
        "messages_and_choices": [bare(name) for name, *_ in main],
        "turn_rewards": [1.0, 8.0],
        "reward": 0.0,
        "additional_histories": [side],
    }
    group = TrajectoryGroupBody.model_validate({"trajectories": [body]})
    config = TrainConfig(scaling="none", baseline="none")
    batch = resolve([group], config, "p/a", sources(find_record=records.get), LIMITS).batch
    (tokens,) = trained_tokens(batch.groups, config)
    assert tokens == [[[(1, 31.0), (3, 8.0)], [(1, 30.0), (3, 28.0)]]]


def test_the_report_of_supervised_training_counts_no_context() -> None:
    """As `train_sft` sends it: weight 0 makes a message context."""
    question = {"role": "user", "content": "q"}
    entries = [question, {"role": "assistant", "content": "a b"}]
    entries += [question, {"role": "assistant", "content": "c"}]
    body = {"messages_and_choices": entries, "reward": 0.0, "turn_advantages": [0.0, 1.0]}
    group = TrajectoryGroupBody.model_validate({"trajectories": [body]})
    config = TrainConfig(objective="likelihood", allow_training_without_logprobs=True)

    def render(messages: list[dict[str, Any]], _: Any, has_header: bool) -> list[int]:
        """Each message is its number and an end."""
        tokens = [token for number, _ in enumerate(messages) for token in (number + 1, 99)]
        return [*tokens, len(messages) + 1] if has_header else tokens

    known = sources(render=render, tokenize=lambda _: [7], end_ids={99}, stop_ids={99})
    report = resolve([group], config, "p/a", known, LIMITS).report
    assert report.num_trained_tokens == report.num_tokens_without_logprob == 1


def test_sampling_that_changes_probabilities_is_noted_once() -> None:
    def find(key: str) -> Record:
        plain = record(key, [5], [6])
        return dataclasses.replace(plain, sampling={"temperature": 0.4, "top_p": 1.0, "n": 8})

    _, report = run([[bare("c-0")], [bare("c-1")]], find=find)
    note, _ = report.notes
    assert "temperature 0.4" in note and "top_p" not in note


def test_rewards_beyond_arithmetic_are_refused_before_there_is_a_job() -> None:
    with refused(InvalidInput, "bad_reward", "groups"):
        run([[choice([1], [2])], [choice([1], [3])]], rewards=[1e200, -1e200])


# --- found by words: one sample or none -----------------------------------------------------------------------------


def test_words_that_fit_samples_of_two_prompts_are_ambiguous_and_dropped() -> None:
    """A converged policy says "yes" with one log-probability everywhere; the agent left the system message out."""
    records = [
        record(f"c-{i}", prompt, [7], prefix=b"with a system message")
        for i, prompt in enumerate(([1, 2, 3], [4, 5, 6]))
    ]
    overrides = found_in(records)
    with refused(InvalidInput, "no_trainable_turn", "groups") as caught:
        run([[QUESTION, said_choice("yes", [-0.5])]], overrides=overrides)
    assert AMBIGUOUS in caught.value.message
    # One of them in the very conversation is certain.
    records[1] = dataclasses.replace(records[1], request=dataclasses.replace(records[1].request, prefix_digest=BEFORE))
    batch, _ = run([[QUESTION, said_choice("yes", [-0.5])]], overrides=overrides)
    assert batch.groups[0].trajectories[0].sequences[0].token_ids == [4, 5, 6, 7]


def test_of_equal_samples_the_newest_step_counts_with_its_own_log_probabilities() -> None:
    def of_step(identity: str, step: int, logprob: float) -> Record:
        plain = record(identity, [5], [6], prefix=BEFORE)
        request = dataclasses.replace(plain.request, step=step)
        return dataclasses.replace(plain, request=request, logprobs=[logprob])

    # Newest first: an opponent at step 3 said the same after the policy at step 9.
    records = [of_step("late", 3, -3.0), of_step("policy", 9, -0.2)]
    batch, report = run([[QUESTION, said_choice("yes")]], overrides=found_in(records))
    (row,) = batch.groups[0].trajectories[0].sequences
    assert row.logprobs == [None, -0.2]
    assert [(span.start, span.stop, span.step) for span in row.spans] == [(1, 2, 9)]
    assert report.sampled_steps == {9: 1}


def test_a_record_of_another_project_is_not_known() -> None:
    own = record("c-0", [1], [2])
    elsewhere = dataclasses.replace(own, request=dataclasses.replace(own.request, model=9, owner="other"))
    with refused(InvalidInput, "no_trainable_turn", "groups") as caught:
        run([[QUESTION, bare("c-0")]], find=lambda _: elsewhere)
    assert NO_RECORD in caught.value.message


def test_a_demonstration_is_never_matched_to_a_sample() -> None:
    sampled = record("c-0", [5], [6], prefix=BEFORE)
    batch, report = run(
        [[QUESTION, {"role": "assistant", "content": "yes"}]],
        config=TrainConfig(allow_training_without_logprobs=True),
        overrides=found_in([sampled]),
    )
    (row,) = batch.groups[0].trajectories[0].sequences
    assert report.turns == {"recomputed": 1} and row.logprobs[-1] is None and row.recompute


def test_the_same_choice_in_two_histories_is_trained_once_without_an_id_too() -> None:
    entries = [QUESTION, choice([1, 2], [3, 4])]
    batch, report = run([entries], histories=[entries])
    assert [row.token_ids for row in batch.groups[0].trajectories[0].sequences] == [[1, 2, 3, 4]]
    assert [dropped.reason for dropped in report.dropped if "twice" in dropped.reason]


def test_a_copy_without_an_id_is_the_same_choice() -> None:
    """In either order, by the ids that it carries."""
    sampled = sampled_with([-0.1, -0.2], [], [], temperature=0.5)
    named, copy = choice([1], [2, 3], "c-0"), choice([1], [2, 3])
    for first, second in ((named, copy), (copy, named)):
        batch, report = run([[first]], histories=[[second]], find=lambda _: sampled)
        assert len(batch.groups[0].trajectories[0].sequences) == 1
        assert [dropped.count for dropped in report.dropped if "twice" in dropped.reason] == [1]
    # Two ids are two samples.
    batch, _ = run([[named]], histories=[[choice([1], [2, 3], "c-1")]])
    assert len(batch.groups[0].trajectories[0].sequences) == 2


def test_a_copy_that_is_found_by_words_takes_no_sibling_s_sample() -> None:
    siblings = [record(f"c-{number}", [5], [6], prefix=BEFORE) for number in range(2)]
    entries = [QUESTION, said_choice("yes")]
    batch, report = run([entries, entries], histories=[entries], overrides=found_in(siblings))
    assert [len(trajectory.sequences) for trajectory in batch.groups[0].trajectories] == [1, 1]
    (twice,) = [dropped for dropped in report.dropped if "twice" in dropped.reason]
    path = "groups[0].trajectories[0].additional_histories[0].messages_and_choices[1]"
    assert twice.examples == [path]


def test_a_cut_answer_that_cannot_be_trained_still_cuts_its_history() -> None:
    long = choice([1] * 50, [2]) | {"finish_reason": "length"}
    batch, _ = run([[choice([1], [2]), long]])
    assert [row.truncated for row in batch.groups[0].trajectories[0].sequences] == [True]


def foreign(tokens: list[int], model: str | None, reason: str) -> dict[str, Any]:
    """A choice that another model sampled behind [1, 2]; without a model's name one of a vendor's server."""
    if model is None:
        return {"message": {"role": "assistant", "content": "x"}, "finish_reason": reason}
    return choice([1, 2], tokens, f"{tokens}", model) | {"finish_reason": reason}


@pytest.mark.parametrize("model", ["p/opponent", None])
@pytest.mark.parametrize(("mine", "theirs"), [("stop", "length"), ("length", "stop"), ("length", "length")])
def test_a_cut_answer_of_an_opponent_does_not_cut_my_history(model: str | None, mine: str, theirs: str) -> None:
    trajectories = [[choice([1], [2 + k]) | {"finish_reason": mine}, foreign([3 + k], model, theirs)] for k in (0, 1)]
    batch, report = run(trajectories, config=TrainConfig(overlong="mask"))
    rows = [row for trajectory in batch.groups[0].trajectories for row in trajectory.sequences]
    assert [row.truncated for row in rows] == [False, False]
    assert report.num_groups_trained == 1


def test_requests_without_a_session_are_reported_where_the_rollouts_have_one() -> None:
    """Since the first request of the job's sessions, without choices that the job has."""
    records = {name: record(name, [5], [6 + k]) for k, name in enumerate(("a-0", "b-0", "c-0"))}
    since: list[int] = []

    def report_of(sessions: dict[str, str | None]) -> Any:
        for name, session in sessions.items():
            request = dataclasses.replace(records[name].request, session=session, requested_at=100 + ord(name[0]))
            records[name] = dataclasses.replace(records[name], request=request)

        def find_unnamed(time: int) -> list[str]:
            since.append(time)
            return ["a-0", "x-0", "x-1", "y-0"]

        entries = [[bare(name)] for name in sessions]
        return run(entries, find=records.get, overrides={"find_unnamed": find_unnamed})[1]

    report = report_of({"a-0": None, "b-0": "s", "c-0": "t"})
    assert report.num_unnamed_requests == 2 and since == [100 + ord("b")]
    assert any(note.startswith("2 requests reached this model without a session") for note in report.notes)
    report = report_of({"a-0": None, "b-0": None})
    assert report.num_unnamed_requests == 0 and len(since) == 1, (
        "a program without sessions puts choices into trajectories"
    )


def test_truncated_belongs_to_the_history_that_was_cut() -> None:
    cut = choice([1], [2]) | {"finish_reason": "length"}
    batch, _ = run([[cut]], histories=[[choice([5], [6])]])
    rows = batch.groups[0].trajectories[0].sequences
    assert [(row.token_ids, row.truncated) for row in rows] == [([1, 2], True), ([5, 6], False)]


def test_a_trajectory_that_cannot_be_trained_counts_in_its_groups_statistics() -> None:
    long = choice(list(range(60)), [1])
    batch, report = run([[long], [choice([1], [2])], [choice([1], [3])]], rewards=[0.0, 1.0, 1.0])
    (group,) = batch.groups
    assert [(trajectory.reward, len(trajectory.sequences)) for trajectory in group.trajectories] == [
        (0, 0),
        (1, 1),
        (1, 1),
    ]
    assert (report.num_groups_trained, report.num_trajectories_trained) == (1, 2)


def test_equal_turn_rewards_of_equal_rewards_are_no_signal() -> None:
    bodies = [
        {"messages_and_choices": [choice([1], [2])], "reward": 1.0, "turn_rewards": [1.0]},
        {"messages_and_choices": [choice([1], [3])], "reward": 1.0, "turn_rewards": [1.0]},
    ]
    group = TrajectoryGroupBody.model_validate({"trajectories": bodies})
    report = resolve([group], TrainConfig(), "p/a", sources(), LIMITS).report
    assert report.num_groups_trained == 0


def test_rewards_that_differ_by_rounding_are_reported_as_equal() -> None:
    turns = [[choice([1], [2])], [choice([1], [3])]]
    _, report = run(turns, [0.1 + 0.2, 0.3])
    assert (report.num_groups_trained, report.num_trained_tokens) == (0, 0)
    (dropped,) = report.dropped
    assert dropped.reason.startswith("all rewards in the group are equal")


@pytest.mark.parametrize("config", [TrainConfig(beta=0.1), TrainConfig(entropy_bonus=0.1)])
def test_groups_that_kl_or_entropy_train_are_not_reported_as_left_out(config: TrainConfig) -> None:
    turns = [[choice([1], [2])], [choice([1], [3, 4])]]
    _, report = run(turns, [1.0, 1.0], config=config)
    assert (report.num_groups_trained, report.num_trajectories_trained) == (1, 2)
    assert (report.num_trained_tokens, report.dropped) == (3, [])
    (note,) = of_groups(report)
    assert note.startswith("1 groups have no signal, because all their rewards are equal")
    _, report = run(turns, [1.0, 0.0], config=config)
    assert of_groups(report) == []
    cut = [choice([1], [2]) | {"finish_reason": "length"}]
    masks = config.model_copy(update={"overlong": "mask"})
    _, report = run([turns[0], cut], [1.0, 1.0], config=masks)
    assert report.num_trained_tokens == 1, "what a mask leaves out is in no term of the loss"


# --- scored as it was sampled ----------------------------------------------------------------------------------------


def sampled_with(sampled: list[float] | None, sets: list[bytes], kept: list[int], **sampling: Any) -> Record:
    plain = record("c-0", [1], [2, 3])
    return dataclasses.replace(plain, sampled_logprobs=sampled, sets=sets, kept=kept, sampling=sampling)


def test_tokens_are_scored_under_what_they_were_sampled_from() -> None:
    first, second = pack_set(np.array([2, 9]), 1000), pack_set(np.array([3, 4]), 1000)
    sampled = sampled_with([-0.1, -0.2], [first, second], [0, 1], temperature=0.7, logit_bias={"4": 1.5})
    entries = [[bare("c-0")], [bare("c-0")]]
    batch, report = run(entries, find=lambda _: sampled)
    for trajectory in batch.groups[0].trajectories:
        assert trajectory.sequences[0].logprobs == [None, -0.1, -0.2]
        assert trajectory.sequences[0].distributions == [-1, 0, 1]
    one, other = batch.distributions
    assert (one.temperature, one.logit_bias) == (0.7, {4: 1.5})
    assert unpack_set(base64.b64decode(one.kept or "")).tolist() == [2, 9]
    assert unpack_set(base64.b64decode(other.kept or "")).tolist() == [3, 4]
    assert of_groups(report) == [] and report.num_tokens_without_logprob == 0
    raw, raw_report = run(entries, find=lambda _: sampled, config=TrainConfig(sampling="raw"))
    assert raw.groups[0].trajectories[0].sequences[0].logprobs == [None, -0.5, -0.5]
    assert raw.distributions == []
    assert "4 tokens were sampled with temperature 0.7" in raw_report.notes[0]


def test_carried_ids_take_the_figures_of_their_record() -> None:
    sampled = sampled_with([-0.1, -0.2], [], [], temperature=0.5)
    batch, report = run([[choice([1], [2, 3], "c-0")]], find=lambda _: sampled)
    (row,) = batch.groups[0].trajectories[0].sequences
    assert (row.logprobs, report.turns) == ([None, -0.1, -0.2], {"ids": 1})
    assert row.distributions == [-1, 0, 0] and batch.distributions[0].temperature == 0.5


@pytest.mark.parametrize("changed", [choice([7], [2, 3], "c-0"), choice([1], [2], "c-0"), choice([1], [4, 5], "c-0")])
def test_carried_ids_that_contradict_their_record_are_dropped(changed: dict[str, Any]) -> None:
    _, report = run([[choice([1], [2, 3])], [changed]], find=lambda _: record("c-0", [1], [2, 3]))
    assert report.turns == {"ids": 1}
    assert "not those that were sampled" in report.dropped[0].reason


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"presence_penalty": 0.5}])
def test_what_the_engine_cannot_tell_counts_as_without_a_log_probability(
    sampling: dict[str, Any],
) -> None:
    unscored = sampled_with(None, [], [], **sampling)
    batch, report = run([[bare("c-0")], [bare("c-0")]], find=lambda _: unscored)
    (row,) = batch.groups[0].trajectories[0].sequences
    assert (row.logprobs, row.recompute) == ([None] * 3, [1, 2])
    assert report.num_tokens_without_logprob == 4
    (note,) = of_groups(report)
    assert note.startswith("4 tokens were sampled with") and "ratio 1" in note
    # A turn that is not trained is not counted.
    _, report = run([[bare("c-0")]], histories=[[bare("c-0")]], find=lambda _: unscored)
    assert report.notes[0].startswith("2 tokens were sampled with")


def test_plain_sampling_keeps_its_raw_log_probabilities() -> None:
    sampled = sampled_with(None, [], [], temperature=1.0, top_k=-1, logit_bias=None, min_tokens=0)
    batch, report = run([[bare("c-0")]], find=lambda _: sampled)
    assert batch.groups[0].trajectories[0].sequences[0].logprobs == [None, -0.5, -0.5]
    assert of_groups(report) == []


def test_trajectories_that_are_masked_are_not_reported_as_trained() -> None:
    cut = choice([1, 2], [3, 4]) | {"finish_reason": "length"}
    turns = [[choice([1, 2], [3, 5])], [cut], [choice([1, 2], [3, 6])]]
    _, report = run(turns, config=TrainConfig(overlong="mask"))
    assert (report.num_trajectories_trained, report.num_trained_tokens, report.num_rows) == (
        2,
        4,
        2,
    )
    left_out = [(dropped.reason, dropped.count, dropped.unit) for dropped in report.dropped]
    reason = "cut at a length limit, and overlong='mask' leaves it out"
    assert left_out == [(reason, 1, "trajectory")]
    _, report = run([[cut], [cut | {"token_ids": [3, 9]}]], config=TrainConfig(overlong="mask"))
    left_out = [(dropped.reason, dropped.count, dropped.unit) for dropped in report.dropped]
    assert left_out == [(reason, 2, "trajectory")], "their rewards differ"
