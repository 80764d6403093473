"""What the policy reads is what the agent sent: twelve families of templates, siblings, edits, and each harmless
difference with what must not pass for it.

The check is written from the agent's side. It reads the prompt that the engine was given back into turns, by the
family's headers, and compares each with the message that the agent sent.
"""

import functools
import inspect
import itertools
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art_server.engine.vllm_process.child import with_prompt
from art_server.ledger import conversation
from art_server.ledger.ledger import Ledger
from art_server.ledger.records import Record, Request
from art_server.shared.engine_messages import FinishedChoice
from tests.makers.toy_facts import facts_of
from tests.quick.ledger import spelled_tokens
from tests.quick.ledger.chat_families import (
    CHATML,
    CHATML_PLAIN,
    FAMILIES,
    Family,
    Message,
    said,
    user,
)

NUMBERS = itertools.count(1)


def ledger_in(file: Path, family: Family, is_splicing: bool = True) -> Ledger:
    ledger = Ledger(file, is_splicing=is_splicing)
    ledger.use_tokenizer(family.folder, facts_of(family.folder))
    return ledger


@functools.cache
def ledger_of(family: Family) -> Ledger:
    return ledger_in(Path(tempfile.mkdtemp()) / "ledger.sqlite", family)


@dataclass
class Talk:
    """Agents on one ledger, and an engine that samples what the test says."""

    family: Family
    model: int = field(default_factory=lambda: next(NUMBERS))
    """Its own, so that nothing of another talk is continued."""
    owner: str = "me"

    def __post_init__(self) -> None:
        self.ledger = ledger_of(self.family)

    def ask(
        self,
        messages: Sequence[Message],
        sampled: Sequence[list[int]],
        *,
        session: str | None = None,
        names: Sequence[str] = (),
        end: str | None = None,
        stops: Sequence[str] = (),
    ) -> list[Record]:
        """One request with as many answers as are given; each ends with the family's token, unless `end` says otherwise or
        its text contains one of the `stops`."""
        request_id = f"{next(NUMBERS):032x}"
        messages = with_ids(messages, names)
        prefix_digest, answers = conversation.past_answers(messages, stops)
        request = Request(request_id, "chat", self.model, 0, self.owner, session, prefix_digest, answers=answers)
        end = (self.family.sampled_end or self.family.end) if end is None else end
        with self.ledger.open_request(request) as opened:
            thoughts = self.ledger.recall_thinking(opened)
            sent = messages
            if any(thoughts):
                sent = conversation.with_thinking("chat", {"messages": messages}, thoughts)["messages"]
            as_rendered: list[Message] = []
            for message in sent:
                own = {"reasoning_content": message["reasoning"]} if "reasoning" in message else {}
                as_rendered.append({**message, **own})  # as vLLM renders it
            rendered = self.family.encode(self.family.render(as_rendered))
            self.ledger.take_prompt(request_id, 0, rendered)
            for index, ids in enumerate(sampled):
                text = self.family.decode(ids)
                stop = next((string for string in stops if string in text), None)
                is_ended = end and stop is None
                tokens = [*ids, *([self.family.tokenizer.token_to_id(end)] if is_ended else [])]
                sample = FinishedChoice(
                    "x",
                    index,
                    text.partition(stop)[0] if stop else text,
                    tokens,
                    [-0.5] * len(tokens),
                    "stop",
                    stop,
                    {"n": 1},
                )
                self.ledger.take_samples([(request_id, index, 0, sample)])
        records = [self.ledger.find(f"{request_id}-{index}") for index in range(len(sampled))]
        return [record for record in records if record is not None]

    def text(self, record: Record) -> str:
        """What the engine was given."""
        return self.family.decode(record.prompt_token_ids)

    def rendering(self, messages: Sequence[Message]) -> str:
        return self.family.decode(self.family.encode(self.family.render(messages)))


def with_ids(messages: Sequence[Message], names: Sequence[str]) -> list[Message]:
    """The messages as an agent sends them that knows the ids of its first answers."""
    marked = [dict(message) for message in messages]
    answers = [message for message in marked if message["role"] == "assistant"]
    for message, name in zip(answers, names, strict=False):
        message["art"] = {"id": name}
    return marked


def spell(family: Family, text: str, cuts: list[int]) -> list[int]:
    """Tokens of a text as a policy may sample them: pieces that are encoded one by one, special tokens whole."""
    ids: list[int] = []
    for part in re.split(r"(<\|[^|]*\|>|</?think>)", text):
        is_special = part.startswith("<") and part.endswith(">")
        ids += spelled_tokens.spell(family.tokenizer, part, [] if is_special else cuts)
    return ids


def turns_of(family: Family, text: str) -> list[str]:
    """The assistant's turns in a prompt, without the one that is to come."""
    return [part.partition(family.end)[0] for part in text.split(family.header)[1:-1]]


def read_turn(family: Family, text: str) -> tuple[str | None, str, list[Any]]:
    """Thinking, content and calls of a turn, by the family's markup, in the test's own words."""
    thinking, mark, rest = text.partition("</think>")
    thinking = thinking.partition("<think>")[2].strip() if mark else None
    rest = rest if mark else text
    calls = [json.loads(body) for body in re.findall(r"<tool_call>\s*(.*?)\s*</tool_call>", rest, re.S)]
    content = rest.partition("<tool_call>")[0] if calls else rest
    content = content.removeprefix(family.before.strip())
    edges = bool(calls or mark or family.strips)
    return thinking or None, content.strip() if edges else content, calls


def assert_law(family: Family, text: str, messages: Sequence[Message], own: Sequence[str | None]) -> None:
    """Each assistant turn that the engine reads is the message that the agent sent. Thinking may be the agent's, dropped,
    or, where the agent sent none, that which this very rollout sampled (`own`)."""
    sent = [message for message in messages if message["role"] == "assistant"]
    turns = turns_of(family, text)
    assert len(turns) == len(sent)
    for turn, message, thought in zip(turns, sent, own, strict=True):
        thinking, content, calls = read_turn(family, turn)
        agents = message.get("reasoning_content")
        allowed = {None, (agents if agents is not None else thought or "").strip() or None}
        assert thinking in allowed
        expected = message["content"]
        if calls or "</think>" in turn or family.strips:
            expected = expected.strip()
        assert content == expected
        asked = [
            {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
            for call in message.get("tool_calls", [])
        ]
        assert json.dumps(calls, sort_keys=True) == json.dumps(asked, sort_keys=True)


WORDS = st.text(alphabet="ab1 \n\tyesno", min_size=1, max_size=12).filter(lambda text: text.strip())
VALUES = st.dictionaries(st.sampled_from("abc"), st.one_of(st.integers(0, 3), st.booleans(), WORDS), max_size=3)
ANSWER = st.fixed_dictionaries(
    {
        "content": WORDS,
        "thinking": st.one_of(st.none(), st.sampled_from(["plan 0", "plan 1", "think twice"])),
        "calls": st.lists(st.tuples(st.sampled_from(["look", "add"]), VALUES), max_size=2),
        "is_compact": st.booleans(),
        "cuts": st.lists(st.integers(0, 60), max_size=4),
        "sends_thinking": st.booleans(),
        "edit": st.sampled_from(["", "", "", " more", "space", "case"]),
    }
)


def write(family: Family, answer: dict[str, Any]) -> tuple[str, Message, str | None]:
    """What the policy samples, the message that the agent makes of it, and the thinking that it sampled."""
    thinking = answer["thinking"] if family.thinks else None
    calls = answer["calls"] if family.calls else []
    content = answer["content"].strip() if thinking or calls or family.strips else answer["content"]
    text = family.before + (f"<think>\n{thinking}\n</think>\n\n" if thinking else "")
    if family.before == "\n" and thinking:
        text = f"\n<think>{thinking}</think>\n"
    text += content
    separators = (",", ":") if answer["is_compact"] else None
    for name, value in calls:
        body = json.dumps({"name": name, "arguments": value}, separators=separators)
        text += f"\n<tool_call>\n{body}\n</tool_call>"
    edits = {"space": content.replace(" ", "  "), "case": content.upper()}
    edited = edits.get(answer["edit"], content + answer["edit"])
    message = said(edited, thinking if thinking and answer["sends_thinking"] else None, calls)
    return text, message, thinking


@pytest.mark.parametrize("name", list(FAMILIES))
@settings(deadline=None, max_examples=30)
@given(
    rounds=st.lists(st.lists(ANSWER, min_size=1, max_size=4), min_size=2, max_size=3),
    is_one_request=st.booleans(),
    has_session=st.booleans(),
)
def test_the_policy_reads_what_the_agent_sent(
    name: str, rounds: list[list[dict[str, Any]]], is_one_request: bool, has_session: bool
) -> None:
    """Siblings of one prompt, each going on with its own answer: equal, alike or edited."""
    family = FAMILIES[name]
    talk = Talk(family)
    rollouts = len(rounds[0])
    paths: list[list[Message]] = [[user("question")] for _ in range(rollouts)]
    own: list[list[str | None]] = [[] for _ in range(rollouts)]
    for number, answers in enumerate(rounds):
        written = [write(family, answers[i % len(answers)]) for i in range(rollouts)]
        spelled = [spell(family, text, answers[i % len(answers)]["cuts"]) for i, (text, _, _) in enumerate(written)]
        if number == 0 and is_one_request and not has_session:
            talk.ask(paths[0], spelled)
        else:
            for i, path in enumerate(paths):
                (record,) = talk.ask(path, [spelled[i]], session=f"s{i}" if has_session else None)
                assert_law(family, talk.text(record), path, own[i])
        for i, (_, message, thinking) in enumerate(written):
            paths[i] += [message, user("and now?")]
            own[i].append(thinking)
    for i, path in enumerate(paths):
        (record,) = talk.ask(path, [[5]], session=f"s{i}" if has_session else None)
        assert_law(family, talk.text(record), path, own[i])


TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="<>{}|"), max_size=20)


@pytest.mark.parametrize("name", list(FAMILIES))
@settings(deadline=None, max_examples=30)
@given(answers=st.lists(ANSWER, min_size=2, max_size=3), texts=st.lists(TEXTS, min_size=3), cut_at=st.integers(0, 5))
def test_an_unedited_conversation_goes_on_from_the_sampled_tokens(
    name: str, answers: list[dict[str, Any]], texts: list[str], cut_at: int
) -> None:
    """However they were split, and also where max_tokens cut them. Thinking is left out: what a template drops cannot go on."""
    family = FAMILIES[name]
    talk = Talk(family)
    messages = [user("question")]
    past, before = list[int](), None
    for number, answer in enumerate(answers):
        content = {"content": texts[number]} if answer["is_compact"] and texts[number].strip() else {}
        text, message, _ = write(family, {**answer, **content, "thinking": None, "edit": ""})
        if name == "GLM-4.5":  # an answer without thinking is rendered behind an empty block
            text = f"\n<think></think>{text}"
        is_cut = number == cut_at
        (record,) = talk.ask(messages, [spell(family, text, answer["cuts"])], end="" if is_cut else None)
        assert record.prompt_token_ids[: len(past)] == past and record.continues == before
        has_same_end = is_cut or not family.sampled_end
        past = record.prompt_token_ids + (record.token_ids if has_same_end else record.token_ids[:-1])
        before = record.choice_id
        messages += [message, user("and now?")]
    (record,) = talk.ask(messages, [[5]])
    assert record.prompt_token_ids[: len(past)] == past and record.link in ("exact", "spliced")
    assert record.prompt_token_ids[-1] == family.encode(family.render(messages))[-1]


STOPS = ["Observation:", "</code>"]
ADDED = st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="<>{}|"), max_size=12)


@pytest.mark.parametrize("name", list(FAMILIES))
@settings(deadline=None, max_examples=30)
@given(
    answers=st.lists(
        st.tuples(WORDS, st.lists(st.integers(0, 60), max_size=4), ADDED, st.booleans()), min_size=2, max_size=3
    ),
    has_session=st.booleans(),
)
def test_what_an_agent_adds_behind_a_stop_string_stands_behind_the_sampled_tokens(
    name: str, answers: list[tuple[str, list[int], str, bool]], has_session: bool
) -> None:
    """The agent receives the text before the stop string, and sends it with the stop string and more. Siblings stop at the
    same text, spelled otherwise."""
    family = FAMILIES[name]
    talk = Talk(family)
    # In gpt-oss' format the digest of no message is that of its text: only a session finds what a stop string cut.
    session = "s" if has_session or name == "gpt-oss" else None
    messages = [user("question")]
    past, before = list[int](), None
    for text, cuts, added, has_sibling in answers:
        text = text.strip()  # as the agent's own parser does
        written = f"\n<think></think>{text}</code>" if name == "GLM-4.5" else f"{family.before}{text}</code>"
        (record,) = talk.ask(messages, [spell(family, written, cuts)], session=session, stops=STOPS)
        assert record.prompt_token_ids[: len(past)] == past and record.continues == before
        if has_sibling:
            talk.ask(messages, [spell(family, f"{text}Observation:", [])], session="t", stops=STOPS)
        past, before = record.prompt_token_ids + record.token_ids, record.choice_id
        messages += [said(f"{text}</code>{added.rstrip()}"), user("and now?")]
    (record,) = talk.ask(messages, [[5]], session=session, stops=STOPS)
    assert record.prompt_token_ids[: len(past)] == past and record.link in ("exact", "spliced")
    assert_law(family, talk.text(record), messages, [None] * len(answers))


# --- the cases that were found, and what must not pass for a harmless difference ----------------------------------------

QWEN = FAMILIES["Qwen3"]
PLAIN = FAMILIES["SmolLM"]


def ask_siblings(talk: Talk, texts: Sequence[str], *, is_one_request: bool = False) -> list[Record]:
    """Answers to one question, of one request or of one each."""
    spelled = [talk.family.encode(text) for text in texts]
    if is_one_request:
        return talk.ask([user("q")], spelled)
    return [talk.ask([user("q")], [ids])[0] for ids in spelled]


CALLING = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("is_one_request", [True, False])
def test_a_rollout_that_returns_its_thinking_gets_its_own(is_one_request: bool) -> None:
    talk = Talk(QWEN)
    thoughts = [f"<think>\nplan {i}\n</think>\n\n{CALLING}" for i in range(8)]
    siblings = ask_siblings(talk, thoughts, is_one_request=is_one_request)
    for i, sibling in enumerate(siblings):
        message = said("", f"plan {i}", [("look", {"a": 1})])
        path = [user("q"), message, {"role": "tool", "content": "result"}]
        (record,) = talk.ask(path, [[5]])
        past = sibling.prompt_token_ids + sibling.token_ids
        assert record.prompt_token_ids[: len(past)] == past


def test_thinking_that_is_not_returned_is_restored_only_where_its_choice_is_certain() -> None:
    talk = Talk(QWEN)
    siblings = ask_siblings(talk, [f"<think>\nplan {i}\n</think>\n\n{CALLING}" for i in range(3)])
    path = [user("q"), said("", None, [("look", {"a": 1})]), {"role": "tool", "content": "result"}]
    (record,) = talk.ask(path, [[5]])
    assert (record.link, record.continues) == ("dropped", siblings[-1].choice_id)
    assert talk.text(record) == talk.rendering(path)
    # The id of its tool call names the one...
    talk.ledger.name_calls(siblings[1].choice_id, ["call-of-1"])
    (named,) = talk.ask(path, [[5]], names=["call-of-1"])
    assert (named.link, named.continues) == ("exact", siblings[1].choice_id)
    assert "plan 1" in talk.text(named)
    # ...and so does its session.
    thought = talk.family.encode(f"<think>\nplan 7\n</think>\n\n{CALLING}")
    (own,) = talk.ask([user("q")], [thought], session="own")
    ask_siblings(talk, [f"<think>\nplan 8\n</think>\n\n{CALLING}"])
    (record,) = talk.ask(path, [[5]], session="own")
    assert record.continues == own.choice_id and "plan 7" in talk.text(record)
    # A user's turn drops it, by the template's rule, whoever is named.
    dropped = [*path[:2], user("and now?")]
    (record,) = talk.ask(dropped, [[5]], names=["call-of-1"])
    assert record.link == "dropped" and talk.text(record) == talk.rendering(dropped)


TOOL_RESULT: Message = {"role": "tool", "content": "result"}


@pytest.mark.parametrize("by", ["name", "session"])
def test_each_of_many_siblings_goes_on_behind_its_own_thinking(by: str) -> None:
    """Their renderings are equal from the second turn on, because none returns its thinking."""
    talk = Talk(QWEN)
    num = 40
    message = said("", None, [("look", {"a": 1})])
    paths: list[list[Message]] = [[user("q")] for _ in range(num)]
    pasts: list[list[int]] = [[] for _ in range(num)]
    names: list[list[str]] = [[] for _ in range(num)]
    for turn in range(4):
        for i in range(num):
            answer = talk.family.encode(f"<think>\nplan {i} of {turn}\n</think>\n\n{CALLING}")
            (record,) = talk.ask(
                paths[i],
                [answer],
                session=f"s{i}" if by == "session" else None,
                names=names[i] if by == "name" else (),
            )
            assert record.prompt_token_ids[: len(pasts[i])] == pasts[i]
            pasts[i] = record.prompt_token_ids + record.token_ids
            names[i].append(record.choice_id)
            paths[i] += [message, TOOL_RESULT]


def test_siblings_are_decoded_once_for_all_their_next_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With long thinking, decoding all of them again for each would hold up every other request."""
    talk = Talk(QWEN)
    siblings = ask_siblings(talk, [f"<think>\nplan {i}\n</think>\n\n{CALLING}" for i in range(9)])
    decoder = talk.ledger._decoder
    assert decoder is not None
    decode, decoded = decoder.decode_behind, list[tuple[int, ...]]()

    def count(ids: Sequence[int], before: int | None) -> str:
        decoded.append(tuple(ids))
        return decode(ids, before)

    monkeypatch.setattr(decoder, "decode_behind", count)
    path = [user("q"), said("", None, [("look", {"a": 1})]), TOOL_RESULT]
    links = [talk.ask(path, [[5]])[0].link for _ in range(4)]
    assert links == ["dropped"] * 4
    for sibling in siblings:
        answer = tuple(sibling.token_ids[:-1])
        assert sum(ids[-len(answer) :] == answer for ids in decoded) == 1


def test_without_a_name_nobody_goes_on_behind_one_of_several_thoughts() -> None:
    talk = Talk(QWEN)
    siblings = ask_siblings(talk, [f"<think>\nplan {i}\n</think>\n\n{CALLING}" for i in range(2)])
    path = [user("q"), said("", None, [("look", {"a": 1})]), TOOL_RESULT]
    for sibling in siblings:
        talk.ask(path, [talk.family.encode(CALLING)], names=[sibling.choice_id])
    path += [said("", None, [("look", {"a": 1})]), TOOL_RESULT]
    (record,) = talk.ask(path, [[5]])
    assert record.link == "dropped" and talk.text(record) == talk.rendering(path)
    (named,) = talk.ask(path, [[5]], names=[siblings[0].choice_id])
    assert "plan 0" in talk.text(named) and "plan 1" not in talk.text(named)


def test_an_edited_answer_does_not_get_the_thinking_of_a_sibling_that_equals_it() -> None:
    talk = Talk(QWEN)
    other = CALLING.replace("1", "2")
    mine, _ = ask_siblings(talk, [f"<think>\nmine\n</think>\n\n{CALLING}", f"<think>\ntheirs\n</think>\n\n{other}"])
    talk.ledger.name_calls(mine.choice_id, ["call-of-mine"])
    edited = [user("q"), said("", None, [("look", {"a": 2})]), TOOL_RESULT]
    for name in (mine.choice_id, "call-of-mine"):
        (record,) = talk.ask(edited, [[5]], names=[name])
        assert (record.link, record.continues) == ("dropped", mine.choice_id)
        assert "theirs" not in talk.text(record)
        assert talk.text(record) == talk.rendering(edited)


@pytest.mark.parametrize(
    "second",
    [
        "<think>\nmore of B\n</think>\n\n" + CALLING,
        '<tool_call>\n{"name":"look","arguments":{"a":1}}\n</tool_call>',
    ],
)
def test_an_answer_that_matches_less_closely_is_not_continued_behind_other_thoughts(
    second: str,
) -> None:
    talk = Talk(QWEN)
    call = said("", None, [("look", {"a": 1})])
    later = [user("q"), call, TOOL_RESULT]
    (a,) = talk.ask([user("q")], [talk.family.encode(f"<think>\nplan of A\n</think>\n\n{CALLING}")])
    (of_a,) = talk.ask(later, [talk.family.encode(CALLING)], names=[a.choice_id])
    assert of_a.continues == a.choice_id and "plan of A" in talk.text(of_a)
    talk.ask([user("q")], [talk.family.encode(f"<think>\nplan of B\n</think>\n\n{CALLING}")])
    talk.ask(later, [talk.family.encode(second)])
    (of_b,) = talk.ask([*later, call, TOOL_RESULT], [[5]])
    assert of_b.continues is not None and "plan of A" not in talk.text(of_b)


def test_names_count_after_a_restart_and_among_thousands(tmp_path: Path) -> None:
    talk = Talk(QWEN)
    file = tmp_path / "ledger.sqlite"
    talk.ledger = ledger_in(file, QWEN)
    spelled = [talk.family.encode(f"<think>\nplan {i}\n</think>\n\n{CALLING}") for i in range(300)]
    siblings = talk.ask([user("q")], spelled)
    talk.ledger.name_calls(siblings[0].choice_id, ["call-0"])
    talk.ledger.name_calls(siblings[1].choice_id, ["functions.look:0"])
    talk.ledger.close()
    talk.ledger = ledger_in(file, QWEN)
    talk.ledger.name_calls(siblings[2].choice_id, ["functions.look:0"])
    path = [user("q"), said("", None, [("look", {"a": 1})]), TOOL_RESULT]
    (named,) = talk.ask(path, [[5]], names=["call-0"])
    assert named.continues == siblings[0].choice_id and "plan 0" in talk.text(named)
    (unnamed,) = talk.ask(path, [[5]], names=["functions.look:0"])
    assert unnamed.link == "dropped"


def test_a_system_line_that_is_not_rendered_changes_no_conversation() -> None:
    def digests(number: int) -> list[bytes]:
        header = {
            "type": "text",
            "text": f"x-anthropic-billing-header: cc_version=2; cch={number};",
        }
        body = {"system": [header, {"type": "text", "text": "help"}], "messages": [user("q")]}
        return conversation.prefix_digests(conversation.messages_of("messages", body))

    assert digests(1) == digests(2)
    of_chat = [{"role": "system", "content": "x-anthropic-billing-header: 7\nhelp"}, user("q")]
    assert conversation.prefix_digests(of_chat) == digests(1)


def test_an_id_of_two_choices_names_neither() -> None:
    """Kimi numbers its calls from 0 in each conversation."""
    talk = Talk(QWEN)
    siblings = ask_siblings(talk, [f"<think>\nplan {i}\n</think>\n\n{CALLING}" for i in range(3)])
    number = f"functions.look:{next(NUMBERS)}"
    for sibling in siblings[:2]:
        talk.ledger.name_calls(sibling.choice_id, [number, number])
    path = [user("q"), said("", None, [("look", {"a": 1})]), TOOL_RESULT]
    (record,) = talk.ask(path, [[5]], names=[number])
    assert record.link == "dropped"


def test_thinking_that_was_restored_is_dropped_by_a_later_user_turn() -> None:
    talk = Talk(QWEN)
    plan, again = (f"<think>\n{thinking}\n</think>\n\n{CALLING}" for thinking in ("plan", "again"))
    talk.ask([user("q")], [talk.family.encode(plan)], session="s")
    path = [user("q"), said("", None, [("look", {"a": 1})]), TOOL_RESULT]
    (second,) = talk.ask(path, [talk.family.encode("fine")], session="s")
    assert second.link == "exact" and "plan" in talk.text(second)
    path += [said("fine"), user("and now?")]
    (third,) = talk.ask(path, [talk.family.encode(again)], session="s")
    assert (third.link, third.continues) == ("dropped", second.choice_id)
    assert talk.text(third) == talk.rendering(path)
    # The thinking behind the user's turn is kept.
    path += [said("", None, [("look", {"a": 1})]), TOOL_RESULT]
    (fourth,) = talk.ask(path, [[5]], session="s")
    assert (fourth.link, fourth.continues) == ("exact", third.choice_id)
    assert "again" in talk.text(fourth) and "plan" not in talk.text(fourth)


def test_an_answer_before_a_user_turn_does_not_get_its_thinking_because_a_later_one_calls() -> None:
    talk = Talk(QWEN)
    ask_siblings(talk, ["<think>\nplan\n</think>\n\nfine"])
    path = [
        user("q"),
        said("fine"),
        user("and now?"),
        said("never sampled", None, [("look", {"a": 1})]),
        TOOL_RESULT,
    ]
    (record,) = talk.ask(path, [[5]])
    assert record.link == "dropped" and talk.text(record) == talk.rendering(path)


def test_white_space_inside_an_answer_is_meaning() -> None:
    talk = Talk(PLAIN)
    ask_siblings(talk, ["1 12", "11 2", "112"])
    for answer in ("1 12", "11 2", "112"):
        path = [user("q"), said(answer), user("more")]
        assert talk.text(talk.ask(path, [[5]])[0]) == talk.rendering(path)
    code = Talk(PLAIN)
    ask_siblings(code, ["if a:\nb()\nc()"])
    path = [user("q"), said("if a:\n    b()\nc()"), user("more")]
    (record,) = code.ask(path, [[5]])
    assert record.link is None and code.text(record) == code.rendering(path)


def test_white_space_at_the_ends_is_harmless_only_where_the_template_strips_it() -> None:
    for name, is_spliced in (("Llama 3", True), ("SmolLM", False)):
        talk = Talk(FAMILIES[name])
        ask_siblings(talk, ["  maybe \n"])
        path = [user("q"), said("maybe"), user("more")]
        (record,) = talk.ask(path, [[5]])
        assert (record.link == "spliced") == is_spliced, name


def test_text_behind_an_answer_that_ended_or_before_its_stop_string_is_an_edit() -> None:
    for written, sent in (
        ("maybe", "maybe</code>"),  # it ended by itself, and the policy read no end behind the stop string
        ("maybe Observation:", "maybe </code>"),
        ("maybe</code>\n", "maybe</code>"),
        ("maybe</code>", "Maybe</code>"),
        ("maybe</code>", "maybe"),
    ):
        talk = Talk(PLAIN)
        talk.ask([user("q")], [PLAIN.encode(written)], stops=STOPS)
        path = [user("q"), said(sent), user("more")]
        (record,) = talk.ask(path, [[5]], stops=STOPS)
        assert record.link is None and talk.text(record) == talk.rendering(path), (written, sent)


def test_other_json_of_the_same_value_is_harmless_and_of_another_is_not() -> None:
    compact = '<tool_call>\n{"name":"look","arguments":{"a":1,"b":[true]}}\n</tool_call>'
    for value, is_spliced in (
        ({"b": [True], "a": 1}, True),
        ({"a": 1.0, "b": [True]}, False),
        ({"a": 1, "b": [1]}, False),
        ({"a": "1", "b": [True]}, False),
    ):
        talk = Talk(QWEN)
        ask_siblings(talk, [compact])
        path = [user("q"), said("", None, [("look", value)]), {"role": "tool", "content": "r"}]
        (record,) = talk.ask(path, [[5]])
        assert (record.link == "spliced") == is_spliced, value
    # Text behind a call, which parsers drop, was never sent.
    talk = Talk(QWEN)
    ask_siblings(talk, [compact + "\nand so on"])
    path = [
        user("q"),
        said("", None, [("look", {"a": 1, "b": [True]})]),
        {"role": "tool", "content": "r"},
    ]
    assert talk.ask(path, [[5]])[0].link is None


@pytest.mark.parametrize(
    ("written", "sent", "is_spliced"),
    [
        ('{"a": 1, "b": [true, "é"]}', '{"a":1,"b":[true,"é"]}', True),
        ('{"a": 1, "b": [true, "é"]}', '{"b": [true, "\\u00e9"], "a": 1}', True),
        ('{"a": 1, "b": []}\n', '{\n  "a": 1,\n  "b": []\n}', True),
        ("[1, 2]", "[1,2]", True),
        ('{"a": 1}', '{"a":1.0}', False),
        ('{"a": 1}', '{"a":true}', False),
        ('{"a": "1 2"}', '{"a":"12"}', False),
        ('{"a": 1, "a": 2}', '{"a":2}', False),
        ('It is {"a": 1}', 'It is {"a":1}', False),
        ("1 12", "112", False),
    ],
)
def test_an_answer_that_is_json_may_come_back_as_other_json_of_the_same_value(
    written: str, sent: str, is_spliced: bool
) -> None:
    talk = Talk(PLAIN)
    (first,) = talk.ask([user("q")], [PLAIN.encode(written)])
    path = [user("q"), said(sent), user("more")]
    (record,) = talk.ask(path, [[5]])
    assert (record.link, record.continues) == (("spliced", first.choice_id) if is_spliced else (None, None))
    past = first.prompt_token_ids + first.token_ids
    assert (record.prompt_token_ids[: len(past)] == past) == is_spliced
    assert is_spliced or talk.text(record) == talk.rendering(path)


def test_an_edited_answer_and_edited_thinking_are_the_new_context() -> None:
    talk = Talk(QWEN)
    ask_siblings(talk, [f"<think>\nSECRET\n</think>\n\n{CALLING}"])
    path = [
        user("q"),
        said("", "[redacted]", [("look", {"a": 1})]),
        {"role": "tool", "content": "result"},
    ]
    (record,) = talk.ask(path, [[5]])
    assert "SECRET" not in talk.text(record) and talk.text(record) == talk.rendering(path)


def test_a_turn_whose_thinking_is_dropped_does_not_pass_for_the_turn_before_it() -> None:
    """The answer before the dropped thinking is rendered as it was sampled."""
    talk = Talk(PLAIN)
    path: list[Message] = [user("q")]
    for text in ("one", "<think>\nhm\n</think>\n\ntwo"):
        (record,) = talk.ask(path, [talk.family.encode(text)])
        path += [said(text.rpartition("\n")[2]), user("more")]
    (last,) = talk.ask(path, [[5]])
    assert (last.link, last.continues) == ("dropped", record.choice_id)


def test_an_empty_think_block_means_dropped() -> None:
    """As GLM-4.5 renders earlier turns."""
    family = FAMILIES["GLM-4.5"]
    talk = Talk(family)
    (first,) = talk.ask([user("q")], [family.encode("\n<think>yes yes long thinking</think>\nmaybe")])
    path = [user("q"), said("maybe"), user("more")]
    assert "<think></think>" in talk.rendering(path)
    (record,) = talk.ask(path, [[5]])
    assert (record.link, record.continues) == ("dropped", first.choice_id)
    assert talk.text(record) == talk.rendering(path)


@pytest.mark.parametrize("sampled_end", ["<|endoftext|>", "<|user|>"])
def test_an_end_that_is_another_roles_header_stays_as_rendered(sampled_end: str) -> None:
    family = FAMILIES["GLM-4.5"]
    talk = Talk(family)
    ids = [*family.encode("\n<think></think>\n"), *family.encode("ma"), *family.encode("ybe")]
    talk.ask([user("q")], [ids], end=sampled_end)
    path = [user("q"), said("maybe"), {"role": "tool", "content": "result 5"}]
    (record,) = talk.ask(path, [[5]])
    assert record.link == "spliced"
    assert talk.text(record) == talk.rendering(path)
    assert "maybe<|observation|>" in talk.text(record)


def test_a_choice_that_was_sampled_from_another_prompt_is_not_continued() -> None:
    """The conversation is the same: its digest leaves out white space, and what only the template says."""
    talk = Talk(PLAIN)
    spelled = spell(PLAIN, "maybe", [1, 2, 3])
    talk.ask([user("a b")], [spelled])
    other = [user("a  b"), said("maybe"), user("more")]
    (record,) = talk.ask(other, [[5]])
    assert record.link is None and talk.text(record) == talk.rendering(other)
    (record,) = talk.ask([user("a b"), *other[1:]], [[5]])
    assert record.link == "spliced"


@pytest.mark.parametrize(
    ("opening", "sampled", "answer", "link"),
    [
        ("", "\n\nmaybe", "\n\nmaybe", "spliced"),  # its white space is one token with the header's
        ("<think>\n", "hm\n</think>\n\nmaybe", "maybe", "dropped"),
        ("<think>\n\n</think>\n\n", "maybe", "maybe", "dropped"),
    ],
)
@pytest.mark.parametrize("is_restarted", [False, True])
def test_what_melts_and_where_thinking_opens_is_known(
    opening: str, sampled: str, answer: str, link: str, is_restarted: bool, tmp_path: Path
) -> None:
    """The opening stands in the prompt and in no later rendering."""
    family = Family(CHATML_PLAIN.replace("assistant\n'", f"assistant\n{opening}'"), **CHATML)
    talk = Talk(family)
    talk.ledger = ledger_in(tmp_path / "ledger.sqlite", family)
    (first,) = talk.ask([user("q")], [spell(family, sampled, [1, 2, 3])])
    if is_restarted:
        talk.ledger.close()
        talk.ledger = ledger_in(tmp_path / "ledger.sqlite", family)
    path = [user("q"), said(answer), user("more")]
    (record,) = talk.ask(path, [[5]])
    assert (record.link, record.continues) == (link, first.choice_id)
    assert link == "spliced" or talk.text(record) == talk.rendering(path)


AMBIGUOUS = spell(PLAIN, "maybe", [1, 2, 3, 4])
"""A spelling of "maybe" that no tokenizer would choose."""


def test_without_splicing_the_difference_is_marked_and_nothing_is_replaced(tmp_path: Path) -> None:
    talk = Talk(PLAIN)
    talk.ledger = ledger_in(tmp_path / "ledger.sqlite", PLAIN, is_splicing=False)
    talk.ask([user("q")], [AMBIGUOUS])
    path = [user("q"), said("maybe"), user("more")]
    (record,) = talk.ask(path, [[5]])
    assert record.link == "retokenized" and record.prompt_token_ids == PLAIN.encode(PLAIN.render(path))


def test_a_conversation_of_many_spliced_turns_is_loaded_after_a_restart(tmp_path: Path) -> None:
    talk, num_turns = Talk(PLAIN), 60
    talk.ledger = ledger_in(tmp_path / "ledger.sqlite", PLAIN)
    path, records = [user("q")], list[Record]()
    for _ in range(num_turns):
        records += talk.ask(path, [AMBIGUOUS])
        path += [said("maybe"), user("q")]
    talk.ledger.close()
    ledger = Ledger(tmp_path / "ledger.sqlite")
    (number,) = ledger._storage.db.execute("SELECT MAX(prompt) FROM records").fetchone()
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + num_turns - 20)  # as with a thousand turns
    try:
        rendering = ledger._storage.load_rendering(number)
    finally:
        sys.setrecursionlimit(limit)
    assert rendering.tolist() == PLAIN.encode(PLAIN.render(path[:-2]))
    assert records[-1].prompt_token_ids != rendering.tolist()


def test_of_equal_answers_the_one_of_the_same_session_is_continued() -> None:
    talk = Talk(PLAIN)
    cuts = {"one": [1, 3], "two": [2, 4]}
    first = {
        session: talk.ask([user("q")], [spell(PLAIN, "maybe", cuts[session])], session=session)[0] for session in cuts
    }
    assert first["one"].token_ids != first["two"].token_ids
    for session in cuts:
        (record,) = talk.ask([user("q"), said("maybe"), user("more")], [[5]], session=session)
        assert record.continues == first[session].choice_id


def test_other_keys_and_models_are_never_spliced_in() -> None:
    talk = Talk(PLAIN)
    own = talk.model
    (first,) = talk.ask([user("q")], [AMBIGUOUS])
    for talk.owner, talk.model, link in (("you", own, None), ("me", own + 1, None), ("me", own, "spliced")):
        (record,) = talk.ask([user("q"), said("maybe"), user("more")], [[5]])
        assert (record.link, record.continues) == (link, link and first.choice_id)


@dataclass
class Params:
    max_tokens: int | None


@pytest.mark.parametrize(
    ("max_tokens", "is_spliced", "limit"),
    [
        (None, True, 2),  # unlimited: up to the context's end
        (4, True, 2),  # what vLLM makes of unlimited behind the rendering
        (2, True, 2),
        (3, False, 3),  # asked for, and does not fit behind the longer prompt
    ],
)
def test_a_splice_never_shortens_what_was_asked_for(max_tokens: int | None, is_spliced: bool, limit: int) -> None:
    prompt = {"type": "token", "prompt_token_ids": [1] * 6, "arrival_time": 1.0}
    params = Params(max_tokens)
    spliced = with_prompt(prompt, [2] * 8, params, max_model_len=10)
    assert (spliced is not None) == is_spliced
    assert params.max_tokens == limit


def test_a_prompt_that_had_no_room_is_recorded_as_it_was_sampled_from() -> None:
    talk = Talk(PLAIN)
    talk.ask([user("q")], [spell(PLAIN, "maybe", [1, 2, 3])])
    path = [user("q"), said("maybe"), user("more")]
    rendered = PLAIN.encode(PLAIN.render(path))
    prefix, answers = conversation.past_answers(path)
    request = Request(*("f" * 32, "chat", talk.model, 0, "me", None, prefix), answers=answers)
    with talk.ledger.open_request(request):
        assert talk.ledger.take_prompt(request.request_id, 0, rendered) is not None
        for index in range(2):
            sample = FinishedChoice("x", index, "", [5], [-0.5], "stop", None, {"n": 2}, rendered=rendered)
            talk.ledger.take_samples([(request.request_id, index, 0, sample)])
    for index in range(2):
        record = talk.ledger.find(f"{request.request_id}-{index}")
        assert record is not None and record.prompt_token_ids == rendered
