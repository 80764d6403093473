"""Over random conversations and three templates: the prompt of a later turn begins with the exact earlier tokens."""

import functools
import inspect
import itertools
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from art_server.ledger import conversation
from art_server.ledger.ledger import Ledger
from art_server.ledger.records import Record, Request
from art_server.process.shared.engine_messages import Sample
from tests.quick.ledger.spelled_tokens import spell, token_id
from tests.toy_facts import facts_of

CORPUS = [
    "the answer is maybe",
    "yes no maybe",
    '{"name": "add", "arguments": {"a": 1}}',
    "hello there",
]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
LLAMA = (
    "<|begin|>{% for m in messages %}<|header|>{{ m.role }}<|end_header|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "<|header|>assistant<|end_header|>\n\n"
)
THINKING = (  # like Qwen3: the thinking of turns before the last question is dropped
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.index0 > last_user %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


@dataclass(frozen=True)
class Family:
    """A tokenizer and a chat template."""

    template: str
    end: str
    thinks: bool = False

    @functools.cached_property
    def folder(self) -> Path:
        specials = [
            "<think>",
            "</think>",
            "<|im_start|>",
            "<|im_end|>",
            "<|begin|>",
            "<|header|>",
            "<|end_header|>",
            "<|eot|>",
        ]
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=330, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(CORPUS * 5, trainer)
        folder = Path(tempfile.mkdtemp())
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": self.end}))
        (folder / "config.json").write_text("{}")
        (folder / "chat_template.jinja").write_text(self.template)
        return folder

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    @property
    def end_id(self) -> int:
        return token_id(self.tokenizer, self.end)

    def render(self, messages: list[dict[str, Any]]) -> list[int]:
        last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
        template = jinja2.Template(self.template, keep_trailing_newline=True)
        text = template.render(messages=messages, last_user=last_user)
        return self.tokenizer.encode(text).ids

    def __hash__(self) -> int:
        return hash(self.template)


FAMILIES = {
    "chatml": Family(CHATML, "<|im_end|>"),
    "llama": Family(LLAMA, "<|eot|>"),
    "thinking": Family(THINKING, "<|im_end|>", thinks=True),
}


class Conversation:
    """A client and an engine that samples what the test says, on one ledger."""

    def __init__(self, family: Family, is_splicing: bool = True, session: str | None = None):
        self.family = family
        self.session = session
        self.owner, self.model = "me", "a"
        self.ledger = Ledger(Path(tempfile.mkdtemp()) / "l.sqlite", is_splicing=is_splicing)
        self.ledger.use_tokenizer(family.folder, facts_of(family.folder))
        self.messages: list[dict[str, Any]] = []
        self._numbers = itertools.count(1)

    def ask(self, text: str, sampled: list[int], is_cut: bool = False) -> Record:
        """Ask, and have the engine sample these tokens."""
        self.messages.append({"role": "user", "content": text})
        request_id = f"{next(self._numbers):032x}"
        digest, answers = conversation.past_answers(self.messages)
        request = Request(
            *(request_id, "chat", "p", self.model, 0, self.owner, self.session, digest),
            answers=answers,
        )
        rendered = self.family.render(self.messages)
        tokens = sampled if is_cut else [*sampled, self.family.end_id]
        said = self.family.tokenizer.decode(sampled, skip_special_tokens=False)
        with self.ledger.open_request(request):
            self.ledger.take_prompt(request_id, 0, rendered)
            finish = "length" if is_cut else "stop"
            sample = Sample("x", 0, said, tokens, [-0.5] * len(tokens), finish, None, {"n": 1})
            self.ledger.take_samples([(request_id, 0, 0, sample)])
        thinking, mark, content = said.partition("</think>")
        message = {"role": "assistant", "content": content.strip() if mark else said}
        if mark:
            message["reasoning_content"] = thinking.removeprefix("<think>").strip()
        self.messages.append(message)
        record = self.ledger.find(f"{request_id}-0")
        assert record is not None
        assert record.prompt_token_ids == rendered or record.link == "spliced"
        return record


texts = st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="<>{}|"), max_size=20)
turns = st.tuples(texts, texts, st.lists(st.integers(0, 100), max_size=5), st.booleans())


@pytest.mark.parametrize("name", list(FAMILIES))
@settings(deadline=None, max_examples=60)
@given(plan=st.lists(turns, min_size=2, max_size=5), thought=texts)
def test_later_prompts_begin_with_the_exact_earlier_tokens(
    name: str, plan: list[tuple[str, str, list[int], bool]], thought: str
) -> None:
    """Except where the template drops thinking, which is marked."""
    family = FAMILIES[name]
    talk = Conversation(family)
    earlier: Record | None = None
    for question, answer, cuts, is_cut in plan:
        said = f"<think>\n{thought}\n</think>\n\n{answer}" if family.thinks else answer
        record = talk.ask(question, spell(family.tokenizer, said, cuts), is_cut)
        if earlier is not None:
            past = earlier.prompt_token_ids + earlier.token_ids
            assert record.continues == earlier.choice_id
            if family.thinks:
                assert record.link == "dropped"
            else:
                assert record.link in ("exact", "spliced")
                assert record.prompt_token_ids[: len(past)] == past
                assert record.prompt_token_ids[-1] == family.render(talk.messages[:-1])[-1]
        earlier = record


def ambiguous_answer() -> list[int]:
    """A spelling of "maybe" that no tokenizer would choose."""
    return spell(FAMILIES["chatml"].tokenizer, "maybe", [1, 2, 3, 4])


def test_thinking_that_the_prompt_opens_is_known_to_be_dropped() -> None:
    """As Qwen3 with thinking, or without it by an empty block: both stand in the prompt and in no later rendering."""
    for opening in ("<think>\n", "<think>\n\n</think>\n\n"):
        family = Family(CHATML + opening, "<|im_end|>")
        talk = Conversation(family)
        spelled = spell(family.tokenizer, "hm\n</think>\n\nmaybe" if opening == "<think>\n" else "maybe", [3])
        first = talk.ask("q", spelled)
        talk.messages[-1] = {"role": "assistant", "content": "maybe"}
        second = talk.ask("and now?", spelled)
        assert (second.link, second.continues) == ("dropped", first.choice_id)
        assert second.prompt_token_ids == family.render(talk.messages[:-1])


def test_white_space_that_melts_into_the_answer_does_not_hide_it() -> None:
    """The header's line break and an answer that begins with one are a single token when rendered again."""
    family = Family(CHATML, "<|im_end|>")
    talk = Conversation(family)
    talk.ask("q", spell(family.tokenizer, "\n\nmaybe", [1, 2, 3]))
    tokens = family.render([*talk.messages])
    record = talk.ask("and now?", spell(family.tokenizer, "yes", []))
    assert record.link == "spliced" and tokens[:4] == record.prompt_token_ids[:4]


def test_without_splicing_the_difference_is_marked_and_nothing_is_replaced() -> None:
    talk = Conversation(FAMILIES["chatml"], is_splicing=False)
    talk.ask("q", ambiguous_answer())
    record = talk.ask("and now?", ambiguous_answer())
    assert record.link == "retokenized"
    assert record.prompt_token_ids == FAMILIES["chatml"].render(talk.messages[:-1])


def test_a_restarted_ledger_goes_on_splicing() -> None:
    talk = Conversation(FAMILIES["chatml"])
    first = talk.ask("q", ambiguous_answer())
    (_, _, file) = talk.ledger._storage.db.execute("PRAGMA database_list").fetchone()
    talk.ledger.close()
    talk.ledger = Ledger(Path(file))
    talk.ledger.use_tokenizer(FAMILIES["chatml"].folder, facts_of(FAMILIES["chatml"].folder))
    second = talk.ask("and now?", ambiguous_answer())
    assert second.link == "spliced" and second.continues == first.choice_id


def test_a_conversation_of_many_spliced_turns_is_loaded_after_a_restart() -> None:
    talk = Conversation(FAMILIES["chatml"])
    num_turns = 60
    last = talk.ask("q", ambiguous_answer())
    for _ in range(num_turns):
        last = talk.ask("q", ambiguous_answer())
    (_, _, file) = talk.ledger._storage.db.execute("PRAGMA database_list").fetchone()
    talk.ledger.close()
    ledger = Ledger(Path(file))
    (number,) = ledger._storage.db.execute("SELECT MAX(prompt) FROM records").fetchone()
    depth = len(inspect.stack())
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(depth + num_turns - 20)  # as with a thousand turns
    try:
        rendering = ledger._storage.load_rendering(number)
    finally:
        sys.setrecursionlimit(limit)
    assert rendering.tolist() == FAMILIES["chatml"].render(talk.messages[:-1])
    assert last.prompt_token_ids != rendering.tolist()


def test_of_equal_answers_the_one_of_the_same_session_is_continued() -> None:
    family = FAMILIES["chatml"]
    one, other = Conversation(family, session="one"), Conversation(family, session="two")
    other.ledger = one.ledger
    other._numbers = itertools.count(100)
    mine = one.ask("q", spell(family.tokenizer, "maybe", [1, 3]))
    theirs = other.ask("q", spell(family.tokenizer, "maybe", [2, 4]))
    assert mine.token_ids != theirs.token_ids
    assert one.ask("more", [5]).continues == mine.choice_id
    assert other.ask("more", [5]).continues == theirs.choice_id


def test_other_keys_and_models_are_never_spliced_in() -> None:
    talk = Conversation(FAMILIES["chatml"])
    first = talk.ask("q", ambiguous_answer())
    asked = talk.messages
    for owner, model, link in (("you", "a", None), ("me", "b", None), ("me", "a", "spliced")):
        talk.messages, talk.owner, talk.model = [*asked], owner, model
        found = talk.ask("and now?", [5])
        assert (found.link, found.continues) == (link, link and first.choice_id)
