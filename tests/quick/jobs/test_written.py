"""Demonstrations are trained as the chat template writes them: with its markup, its thinking and its end of the turn."""

from typing import Any

import pytest

from art_server.errors import InvalidInput
from art_server.jobs.written_messages import messages_for_engine
from tests.quick.jobs.written_turns import train_demonstrations
from tests.quick.ledger.chat_families import CHATML, CHATML_PLAIN, FAMILIES, Family, said, user
from tests.refusals import refused

CALL = ("look", {"a": 1})
RESULT = {"role": "tool", "content": "result", "tool_call_id": "call_0"}
OPENED = Family(
    CHATML_PLAIN.replace("'<|im_start|>assistant\n' -}}{", "'<|im_start|>assistant\n<think>\n' -}}{"),
    **CHATML,
)

"""Its prompt opens thinking that its rendering of an answer does not contain."""


def trained_texts(family: Family, entries: list[dict[str, Any]]) -> list[str]:
    return train_demonstrations(family, entries).texts


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen3", "<think>\n\n</think>\n\nmaybe<|im_end|>"),
        ("Qwen2.5", "maybe<|im_end|>"),
        ("Llama 3", "maybe<|eot_id|>"),
        ("Gemma 3", "maybe<end_of_turn>"),
        ("GLM-4.5", "\n<think></think>\nmaybe<|user|>"),
        ("gpt-oss", "<|channel|>final<|message|>maybe<|return|>"),
        ("Mistral", "maybe</s>"),
    ],
)
def test_an_answer_is_trained_with_the_end_that_its_family_writes(name: str, expected: str) -> None:
    assert trained_texts(FAMILIES[name], [user("q"), said("maybe")]) == [expected]


def test_thinking_and_calls_are_trained_in_the_familys_markup() -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'
    entries = [user("q"), said("", "plan", [CALL]), RESULT, said("fine")]
    qwen = trained_texts(FAMILIES["Qwen3"], entries)
    assert qwen[0] == f"<think>\nplan\n</think>\n\n{call}<|im_end|>"
    (glm, _) = trained_texts(FAMILIES["GLM-4.5"], entries)
    assert glm.startswith("\n<think>plan</think>") and "<arg_key>a</arg_key>" in glm
    assert glm.endswith("</tool_call><|observation|>")


@pytest.mark.parametrize("name", ["Qwen2.5", "SmolLM", "Mistral", "DeepSeek"])
@pytest.mark.parametrize("space", ["", "\n"])
def test_a_demonstration_that_spells_a_control_token_is_trained_to_its_real_end(name: str, space: str) -> None:
    """Also where its first token merges with the prompt's last one."""
    family = FAMILIES[name]
    text = f"{space}It writes {family.end} twice: {family.end}"
    question = user(f"What ends a turn?{family.end}{family.header}no")
    assert trained_texts(family, [question, said(text)]) == [text + family.end]


def test_an_answer_that_the_template_cannot_write_behind_the_prompt_is_dropped() -> None:
    with refused(InvalidInput, "no_trainable_turn", "groups[0].trajectories[0]"):
        trained_texts(OPENED, [user("q"), said("maybe")])


@pytest.mark.parametrize("name", ["Gemma 3", "Llama 3", "DeepSeek"])
def test_calls_that_a_template_cannot_write_are_not_trained_as_silence(name: str) -> None:
    with refused(InvalidInput, "no_trainable_turn", "groups[0].trajectories[0]"):
        trained_texts(FAMILIES[name], [user("q"), said("let me look", calls=[CALL])])


@pytest.mark.parametrize("template", ["phi3", "phi3_5"])
def test_what_closes_the_whole_conversation_is_not_trained(template: str) -> None:
    eos = ("<|assistant|>", "<|end|>")
    family = Family(template, "<|assistant|>\n", "<|endoftext|>", eos=eos, specials=("<|user|>",))
    assert trained_texts(family, [user("q"), said("maybe")]) == ["maybe<|end|>"]


def test_messages_reach_the_engine_in_its_own_form() -> None:
    function = {"name": "look", "arguments": {"a": 1}}
    message = {
        "role": "assistant",
        "content": None,
        "name": None,
        "reasoning_content": "plan",
        "tool_calls": [{"id": None, "function": function}],
        "score": 0.5,
    }
    (sent,) = messages_for_engine([message], None)
    assert sent == {
        "role": "assistant",
        "reasoning": "plan",
        "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}],
    }
    assert function["arguments"] == {"a": 1}, "the program's own message stays"
    assert messages_for_engine([user("q")], None) == [user("q")]
