"""The shipped `art/tiny`: its files, tokenizer, chat template, and sampled behaviour."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any, TypeAlias, cast

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

REPOSITORY = Path(__file__).parents[3]
MODEL_DIR = REPOSITORY / "art_server" / "tiny_model"
sys.path.append(str(REPOSITORY / "scripts"))
measuring = importlib.import_module("tiny_model.measuring")
words = importlib.import_module("tiny_model.words")
Sampler: TypeAlias = Any  # Any: measuring.Sampler, whose module a type checker does not find

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def sampler(tokenizer: PreTrainedTokenizerBase) -> Sampler:
    torch.manual_seed(0)
    # A CPU without AMX computes in bfloat16 much slower.
    return measuring.Sampler(AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32), tokenizer)


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict],
    **template_arguments: Any,  # Any: those of the template, besides transformers' own
) -> str:
    text = tokenizer.apply_chat_template(messages, tokenize=False, **template_arguments)
    return cast(str, text)


def call(arguments: str | dict, name: str = "add") -> dict:
    function = {"name": name, "arguments": arguments}
    return {"id": "call_0", "type": "function", "function": function}


def test_weights_stay_below_ten_megabytes() -> None:
    assert (MODEL_DIR / "model.safetensors").stat().st_size <= 10_000_000


def test_generation_config_holds_nothing_but_token_ids(tokenizer: PreTrainedTokenizerBase) -> None:
    config = json.loads((MODEL_DIR / "generation_config.json").read_text())
    del config["transformers_version"]
    assert config == {
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
        "pad_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    } | {key: True for key in config if key == "_from_model_config"}


@pytest.mark.parametrize(
    "text",
    [
        "Hello, World!  two  spaces\n\n\tand a tab ",
        "Zürich São Paulo ß 東京 русский العربية",
        "👩‍🚀🎉 \u200b\ufeff e\u0301 𝔘",
        '{"a": -12.50, "b": [true, null]}',
        "<tool_call>\n{}\n</tool_call> <think> </think>",
    ],
)
def test_text_round_trips_through_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_digits_are_single_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    assert [tokenizer.decode([token]) for token in tokenizer.encode("20480")] == list("20480")


def test_tags_are_single_visible_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    for tag in ("tool_call", "tool_response", "think"):
        for token in (f"<{tag}>", f"</{tag}>"):
            assert len(tokenizer.encode(token)) == 1
            assert tokenizer.decode(tokenizer.encode(token), skip_special_tokens=True) == token
    assert tokenizer.decode(tokenizer.encode("<|im_end|>"), skip_special_tokens=True) == ""


def test_system_and_user_turns_render_as_chatml(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert render(tokenizer, messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_text_parts_render_as_their_lines(tokenizer: PreTrainedTokenizerBase) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render(tokenizer, [{"role": "user", "content": parts}]) == ("<|im_start|>user\none\ntwo<|im_end|>\n")


def test_tools_stand_in_the_system_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    expected_tools = (
        "Your tools:\n<tools>\n"
        '{"type": "function", "function": {"name": "add", "description": "Add two numbers.", '
        '"parameters": {"type": "object", "properties": {"a": {"type": "integer"}, '
        '"b": {"type": "integer"}}, "required": ["a", "b"]}}}\n'
        "</tools>\nCall a tool like this:\n"
        '<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call><|im_end|>\n'
    )
    user = {"role": "user", "content": "Hi"}
    system = {"role": "system", "content": "Be brief."}
    rest = "<|im_start|>user\nHi<|im_end|>\n"
    assert render(tokenizer, [user], tools=[ADD]) == ("<|im_start|>system\n" + expected_tools + rest)
    assert render(tokenizer, [system, user], tools=[ADD]) == (
        "<|im_start|>system\nBe brief.\n\n" + expected_tools + rest
    )


def test_calls_and_results_render_in_hermes_tags(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "user", "content": "Add 1 and 2, and 3 and 4."},
        {"role": "assistant", "content": None, "tool_calls": [call({"a": 1, "b": 2}), call({"a": 3, "b": 4})]},
        {"role": "tool", "tool_call_id": "call_0", "content": "3"},
        {"role": "tool", "tool_call_id": "call_1", "content": "7"},
    ]
    assert render(tokenizer, messages, add_generation_prompt=True) == (
        "<|im_start|>user\nAdd 1 and 2, and 3 and 4.<|im_end|>\n"
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n"
        "<tool_response>\n3\n</tool_response>\n"
        "<tool_response>\n7\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("content", [None, "", "I add."])
def test_arguments_render_alike_as_text_and_as_dict(tokenizer: PreTrainedTokenizerBase, content: str | None) -> None:
    arguments = {"city": "Zürich", "n": 3}
    as_dict, as_text = (
        render(tokenizer, [{"role": "assistant", "content": content, "tool_calls": [call(form, "w")]}])
        for form in (arguments, json.dumps(arguments, ensure_ascii=False))
    )
    assert as_dict == as_text
    lead = "I add.\n" if content else ""
    assert as_dict == (
        f"<|im_start|>assistant\n{lead}<tool_call>\n"
        '{"name": "w", "arguments": {"city": "Zürich", "n": 3}}\n</tool_call><|im_end|>\n'
    )


def test_thinking_opens_a_thought_only_when_asked(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    thoughtless = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    for switch in ({}, {"enable_thinking": False}):
        assert render(tokenizer, messages, add_generation_prompt=True, **switch) == thoughtless
    assert render(tokenizer, messages, add_generation_prompt=True, enable_thinking=True) == (thoughtless + "<think>\n")


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_thoughts_before_the_last_question_are_left_out(tokenizer: PreTrainedTokenizerBase, key: str) -> None:
    messages = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "1", key: "Early."},
        {"role": "user", "content": "Two"},
        {"role": "assistant", "content": None, "tool_calls": [call("{}")], key: "\nLate.\n"},
        {"role": "tool", "tool_call_id": "call_0", "content": "2"},
        {"role": "assistant", "content": "\n\n2", key: "Last."},
    ]
    assert render(tokenizer, messages) == (
        "<|im_start|>user\nOne<|im_end|>\n"
        "<|im_start|>assistant\n1<|im_end|>\n"
        "<|im_start|>user\nTwo<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nLate.\n</think>\n\n"
        '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\nLast.\n</think>\n\n2<|im_end|>\n"
    )


def test_a_thought_inside_the_content_is_recognised(tokenizer: PreTrainedTokenizerBase) -> None:
    answer = {"role": "assistant", "content": "Hm.\n</think>\n\nyes"}
    question = {"role": "user", "content": "Say yes"}
    turn = "<|im_start|>user\nSay yes<|im_end|>\n"
    assert render(tokenizer, [question, answer]) == (
        turn + "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nyes<|im_end|>\n"
    )
    assert render(tokenizer, [question, answer, question]) == (turn + "<|im_start|>assistant\nyes<|im_end|>\n" + turn)


def test_each_turn_of_a_conversation_extends_the_prompt_before_it(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add 12 and 30."},
        {"role": "assistant", "content": None, "tool_calls": [call({"a": 12, "b": 30})]},
        {"role": "tool", "tool_call_id": "call_0", "content": "42"},
        {"role": "assistant", "content": "The result is 42."},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "You are welcome."},
    ]
    written = {
        2: '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 30}}\n</tool_call>',
        4: "The result is 42.",
        6: "You are welcome.",
    }
    for turn, text in written.items():
        prompt = render(tokenizer, messages[:turn], tools=[ADD], add_generation_prompt=True)
        ids = tokenizer.encode(prompt) + tokenizer.encode(text + "<|im_end|>")
        later = tokenizer.encode(render(tokenizer, messages, tools=[ADD]))
        assert later[: len(ids)] == ids


def rates_by_name(rates: list) -> dict[str, float]:
    return {rate.what: rate.value for rate in rates}


def test_yes_no_maybe_answers_keep_the_form_and_leave_room(sampler: Sampler) -> None:
    prompts = [
        (f"respond with {a}, {b}, {c}")
        for a, b, c in (("yes", "no", "maybe"), ("maybe", "yes", "no"), ("'no'", "'maybe'", "'yes'"))
    ]
    chats = [measuring.Chat([{"role": "user", "content": prompt}]) for prompt in prompts * 43]
    answers = sampler.answer(chats, 8)
    assert set(answers) >= {"yes", "no", "maybe"}
    rewards = [{"yes": 0.5, "no": 0.75, "maybe": 1.0}.get(answer, 0.0) for answer in answers]
    assert 0.4 < sum(rewards) / len(rewards) < 0.62


def test_tictactoe_moves_are_legal(sampler: Sampler) -> None:
    games = measuring.play_games(sampler, words.make_rng("test"), 8, rows_and_columns=False)
    legal = [is_legal for game in games for is_legal in game.moves_are_legal]
    assert len(legal) >= 20
    assert sum(legal) / len(legal) >= 0.9
    assert len({game.first_move for game in games}) >= 4


def test_tool_calls_are_right_and_answers_carry_the_result(sampler: Sampler) -> None:
    rng = words.make_rng("test", held_out=True)
    rates = rates_by_name(measuring.measure_single_calls(sampler, rng, 24))
    assert rates["well-formed"] >= 0.87
    assert rates["right tool and exact arguments"] >= 0.7
    assert rates["carried into the answer"] >= 0.8
