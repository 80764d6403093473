"""Demonstrations are trained as the chat template writes them: with its markup, its thinking and its end of the turn."""

import functools
import json
from typing import Any

import pytest

from art_protocol.wire import TrainConfig, TrajectoryGroupBody
from art_server.engine.vllm_process import plain_text
from art_server.engine.vllm_process.plain_text import ControlTokens, MarkedRendering
from art_server.errors import InvalidInput
from art_server.jobs.token_sources import Limits, TokenSources
from art_server.ledger import conversation
from art_server.ledger.decoder import Decoder
from tests.quick.ledger.chat_families import CHATML, CHATML_PLAIN, FAMILIES, Family, said, user
from tests.refusals import refused
from tests.resolving import resolve
from tests.toy_facts import facts_of

CALL = ("look", {"a": 1})
RESULT = {"role": "tool", "content": "result", "tool_call_id": "call_0"}
OPENED = Family(
    CHATML_PLAIN.replace("'<|im_start|>assistant\n' -}}{", "'<|im_start|>assistant\n<think>\n' -}}{"),
    **CHATML,
)

"""Its prompt opens thinking that its rendering of an answer does not contain."""


def as_templates_read(message: dict[str, Any]) -> dict[str, Any]:
    """vLLM's route takes the arguments of calls as text, and gives them to the template as objects."""
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.loads(call["function"]["arguments"]),
            },
        }
        for call in message.get("tool_calls") or ()
    ]
    return {**message, **({"tool_calls": calls} if calls else {})}


def sources(family: Family) -> TokenSources:
    facts = facts_of(family.folder)
    decoder = Decoder(family.folder, facts.stop_ids, facts.rules.behind_answer)
    control = ControlTokens(family.tokenizer, family.text)

    def render(messages: list[dict[str, Any]], tools: Any, has_header: bool) -> list[int]:
        apply = functools.partial(
            family.compiled.render,
            add_generation_prompt=has_header,
            bos_token="",
            eos_token=family.end,
        )
        text = plain_text.render(
            control,
            lambda conversation: apply(messages=conversation),
            {"conversation": [as_templates_read(message) for message in messages]},
        )
        return text.token_ids(False) if isinstance(text, MarkedRendering) else family.encode(text)

    return TokenSources(
        find_record=lambda _: None,
        find_by_logprobs=lambda logprobs: [],
        find_by_conversation=lambda prefix, answer: [],
        render=render,
        tokenize=family.encode,
        decode=decoder.decode,
        end_id=decoder.end_id,
        end_ids=decoder.end_ids,
        stop_ids=decoder.stop_ids,
        find_unnamed=lambda since: [],
    )


def trained_texts(family: Family, entries: list[dict[str, Any]]) -> list[str]:
    """What is trained of a demonstration, turn by turn, as text."""
    trajectory = {"messages_and_choices": entries, "reward": 1.0}
    group = TrajectoryGroupBody.model_validate({"trajectories": [trajectory]})
    limits = Limits(vocab_size=100_000, max_seq_length=10_000)
    config = TrainConfig(allow_training_without_logprobs=True)
    found = resolve([group], config, "p/a", sources(family), limits)
    sequences = found.batch.groups[0].trajectories[0].sequences
    texts: list[str] = []
    for sequence in sequences:
        starts = [i for i in sequence.recompute if i - 1 not in sequence.recompute]
        for start in starts:
            stop = next(i for i in range(start, 10_000) if i not in sequence.recompute)
            texts.append(family.decode(sequence.token_ids[start:stop]))
    return texts


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
    with refused(InvalidInput, "no_trainable_turn", "groups"):
        trained_texts(OPENED, [user("q"), said("maybe")])


@pytest.mark.parametrize("name", ["Gemma 3", "Llama 3", "DeepSeek"])
def test_calls_that_a_template_cannot_write_are_not_trained_as_silence(name: str) -> None:
    with refused(InvalidInput, "no_trainable_turn", "groups"):
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
        "reasoning_content": "plan",
        "tool_calls": [{"function": function}],
    }
    made = conversation.for_engine(message)
    assert made["reasoning"] == "plan"
    assert made["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert function["arguments"] == {"a": 1}, "the program's own message stays"
    assert conversation.for_engine(user("q")) == user("q")
