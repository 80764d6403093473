"""Parsers and rules follow from the chat template."""

import importlib.util
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from art_server.engine.inspection_process.parsers import choose_parsers, thinks_by_default
from art_server.engine.inspection_process.template import (
    Templates,
    find_notes,
    find_rules,
    read_templates,
)
from art_server.store.base_facts import Parsers
from art_server.store.base_models import TINY_DIR

ASK = "{% for m in messages %}{{ m.content }}{% endfor %}"
QWEN3 = ASK + (  # thinks unless told not to
    "<tool_call>{% if add_generation_prompt %}{% if enable_thinking is defined and enable_thinking is false %}"
    "<think></think>{% endif %}{% endif %}"
)
OFF = ASK + "{% if enable_thinking %}<think>{% endif %}"


SPEC = importlib.util.find_spec("trl")  # its import takes seconds, and only its files are read
assert SPEC is not None and SPEC.origin is not None
TRL = Path(SPEC.origin).parent / "chat_templates"
"""TRL's copies of published templates."""

FAMILIES: list[tuple[str, str, str, Parsers]] = [
    ("Qwen2.5", "qwen2", "qwen2_5", Parsers("hermes")),
    ("Qwen3", "qwen3", "qwen3", Parsers("hermes", "qwen3", True)),
    ("Qwen3 2507", "qwen3", "qwen3_instruct_2507", Parsers("hermes")),
    ("Qwen3 2507 Thinking", "qwen3", "<tool_call><think>", Parsers("hermes", "qwen3")),
    ("Qwen3-Coder", "qwen3_moe", "<tool_call>\n<function=", Parsers("qwen3_xml")),
    ("Qwen3-VL", "qwen3_vl", "qwen3_vl", Parsers("hermes")),
    ("Qwen3.5", "qwen3_5", "qwen3_5_think", Parsers("qwen3_xml", "qwen3", True)),
    ("Qwen3.5, silent", "qwen3_5", "qwen3_5_nothink", Parsers("qwen3_xml", "qwen3", False)),
    ("Qwen3.6", "qwen3_5_moe", "qwen3_6", Parsers("qwen3_xml", "qwen3", True)),
    ("Qwen3.8", "qwen3_5", "qwen3_8", Parsers("qwen3_xml", "qwen3", True)),
    ("R1 Distill Qwen", "qwen2", "deepseek_r1_distill", Parsers("deepseek_v3", "deepseek_r1")),
    ("R1 Distill Llama", "llama", "deepseek_r1_distill", Parsers("deepseek_v3", "deepseek_r1")),
    ("DeepSeek V3", "deepseek_v3", "deepseekv3", Parsers("deepseek_v3", "deepseek_r1")),
    (
        "DeepSeek V3.1",
        "deepseek_v3",
        "<think><｜tool▁calls▁begin｜>",
        Parsers("deepseek_v31", "deepseek_v3"),
    ),
    ("Llama 3.1", "llama", "llama3_1", Parsers("llama3_json")),
    ("Llama 3.2", "llama", "llama3_2", Parsers("llama3_json")),
    ("Llama 3", "llama", "llama3", Parsers(None)),
    ("Llama-Nemotron", "llama", "<TOOLCALL><think>", Parsers(None, "qwen3")),
    ("Gemma 3", "gemma3", "gemma3", Parsers(None)),
    ("FunctionGemma", "gemma3_text", "<start_function_call>", Parsers("functiongemma")),
    ("Gemma 4", "gemma4", "gemma4", Parsers("gemma4", "gemma4", False)),
    ("Gemma 4, text", "gemma4_text", "gemma4_v3", Parsers("gemma4", "gemma4", False)),
    ("Gemma 4, unified", "gemma4_unified", "gemma4_v5", Parsers("gemma4", "gemma4", False)),
    ("Mistral 7B v0.3", "mistral", "[AVAILABLE_TOOLS][TOOL_CALLS]", Parsers(None)),
    ("Ministral 3", "mistral3", "[AVAILABLE_TOOLS][TOOL_CALLS][ARGS]", Parsers("mistral")),
    ("Magistral", "mistral3", "[TOOL_CALLS][ARGS][THINK][/THINK]", Parsers("mistral", "mistral")),
    ("Phi-4-mini", "phi3", "<|tool|><|/tool|>", Parsers("phi4_mini_json")),
    ("Phi 3.5", "phi3", "phi3_5", Parsers(None)),
    ("Phi-4-reasoning", "phi3", "<think></think>", Parsers(None, "qwen3")),
    ("gpt-oss", "gpt_oss", "gptoss", Parsers("openai", "openai_gptoss")),
    ("GLM 4.5", "glm4_moe", "glm4moe", Parsers("glm47", "glm47", True)),
    ("GLM 4.7 Flash", "glm4_moe_lite", "glm4moe", Parsers("glm47", "glm47", True)),
    ("GLM 4.6V", "glm4v_moe", "glm4moe", Parsers("glm47", "glm47", True)),
    ("OLMo 3", "olmo3", "<functions><function_calls>", Parsers("olmo3")),
    ("OLMo 3 Think", "olmo3", "<function_calls><think>", Parsers("olmo3", "olmo3")),
    ("SmolLM3", "smollm3", QWEN3, Parsers("hermes", "qwen3", True)),
    ("Granite 4", "granitemoehybrid", "<tools><tool_call>", Parsers("hermes")),
    (
        "Granite 3.3",
        "granite",
        "<|tool_call|> Write your thought process",
        Parsers("granite", "granite"),
    ),
    ("LFM2", "lfm2", "lfm2", Parsers("lfm2")),
    ("LFM2, newer", "lfm2_moe", "lfm2_v2", Parsers("lfm2")),
    ("LFM2.5", "lfm2", "lfm2_2_5", Parsers("lfm2", "qwen3")),
    ("Nemotron Nano 2", "nemotron_h", "<TOOLCALL><think>", Parsers(None, "nemotron_v3")),
    ("Nemotron 3", "nemotron_h", "nemotron_3_nano", Parsers("qwen3_coder", "nemotron_v3", True)),
    ("Falcon-H1", "falcon_h1", "<tool_call>", Parsers("hermes")),
    ("Seed-OSS", "seed_oss", "<seed:tool_call><seed:think>", Parsers("seed_oss", "seed_oss", True)),
    ("EXAONE 4", "exaone4", OFF + "<tool_call>", Parsers("hermes", "qwen3", False)),
    (
        "Hunyuan",
        "hunyuan_v1_dense",
        "<tool_calls><think><answer>",
        Parsers("hunyuan_a13b", "hunyuan_a13b"),
    ),
    ("ERNIE 4.5", "ernie4_5_moe", "<tool_call><think><response>", Parsers("ernie45", "ernie45")),
    ("ERNIE 4.5 PT", "ernie4_5", ASK, Parsers(None)),
    ("Hunyuan Instruct", "hunyuan_v1_dense", ASK, Parsers(None)),
    ("Hy3", "hy_v3", "<think><tool_calls><tool_sep><arg_key>", Parsers("hy_v3", "hy_v3")),
    (
        "MiniMax M2",
        "minimax_m2",
        "<minimax:tool_call><think>",
        Parsers("minimax_m2", "minimax_m2"),
    ),
    ("Kimi K2", "kimi_k2", "<|tool_calls_section_begin|>", Parsers("kimi_k2")),
    (
        "Kimi K2 Thinking",
        "kimi_k2",
        "<|tool_calls_section_begin|><think>",
        Parsers("kimi_k2", "kimi_k2", True),
    ),
    ("Apertus", "apertus", "<|tools_prefix|>", Parsers("apertus")),
    ("Command R7B", "cohere2", "<|START_ACTION|><|START_THINKING|>", Parsers(None)),
    ("Trinity", "afmoe", "<tool_call><think>", Parsers("hermes", "qwen3")),
    ("Laguna", "laguna", "<tool_call><arg_key><think>", Parsers("poolside_v1", "poolside_v1")),
    ("Muse Glimmer", "muse_glimmer", "muse_glimmer", Parsers("muse_glimmer", "muse_glimmer")),
    ("a base without a template", "qwen3", "", Parsers(None)),
    ("a template without marks", "llama", ASK, Parsers(None)),
]


@pytest.mark.parametrize(
    ("kind", "template", "expected"),
    [row[1:] for row in FAMILIES],
    ids=[row[0] for row in FAMILIES],
)
def test_parsers_follow_the_marks_of_published_templates(kind: str, template: str, expected: Parsers) -> None:
    """Where TRL has no copy of a template, its marks stand for it."""
    if template.isidentifier():
        template = (TRL / f"{template}.jinja").read_text()
    assert choose_parsers(Templates(template, template), kind) == expected


NAMED = [
    {"name": "default", "template": OFF},
    {"name": "tool_use", "template": ASK + "[TOOL_CALLS][ARGS]"},
    {"name": "rag", "template": "rag"},
]


def test_templates_by_name_are_those_of_transformers(tmp_path: Path) -> None:
    """As Hermes 3 and Command R publish them: a list; and as transformers saves them: files."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": NAMED}))
    for _ in range(2):
        templates = read_templates(tmp_path)
        assert templates == Templates(OFF, ASK + "[TOOL_CALLS][ARGS]")
        assert choose_parsers(templates, "llama") == Parsers("mistral")
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
        (tmp_path / "chat_template.jinja").write_text(OFF)
        (tmp_path / "additional_chat_templates").mkdir(exist_ok=True)
        for entry in NAMED[1:]:
            file = tmp_path / "additional_chat_templates" / f"{entry['name']}.jinja"
            file.write_text(entry["template"])
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").unlink()
    assert read_templates(tmp_path) == Templates(OFF, OFF)
    (tmp_path / "mine.jinja").write_text(ASK)
    assert read_templates(tmp_path, tmp_path / "mine.jinja") == Templates(ASK, ASK)


def test_a_template_of_a_processor_is_read(tmp_path: Path) -> None:
    """As repositories of models that read images have it."""
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": ASK}))
    assert read_templates(tmp_path) == Templates(ASK, ASK)


def test_rules_that_the_template_for_tools_does_not_share_are_not_assumed() -> None:
    strips = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}"
    keeps = strips.replace(" | trim", "")
    alone = find_rules(Templates(strips, strips))
    assert (alone.left, alone.right) == (None, None)
    both = find_rules(Templates(strips, keeps))
    assert (both.left, both.right) == ("", "")
    assert both.behind_answer == alone.behind_answer == "<end><user>question<end>"


def test_the_embedded_model_does_not_think_unless_asked() -> None:
    assert choose_parsers(read_templates(TINY_DIR), "qwen3") == Parsers("hermes", "qwen3", False)


def test_a_template_that_cannot_be_rendered_is_taken_as_vllm_takes_it() -> None:
    assert thinks_by_default("{{ raise_exception('no') }}{% if enable_thinking %}<think>{% endif %}")


def test_a_template_with_loop_controls_is_rendered() -> None:
    template = "{% for m in messages %}{% break %}{% endfor %}{% if enable_thinking %}<think>{% endif %}"
    assert not thinks_by_default(template)


@pytest.mark.parametrize("template", ["{{ 1 + messages }}", "{% if %}", "{{ tools[0]['a'] }}"])
def test_any_error_of_a_template_counts_as_thinking(template: str) -> None:
    assert thinks_by_default(template)


def test_a_template_that_marks_generated_text_is_rendered() -> None:
    """`{% generation %}`, as LFM2.5 and templates for assistant masks have it."""
    marked = (
        "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content | trim }}{% endgeneration %}<end>{% endfor %}"
        "{% if enable_thinking %}<think>{% endif %}"
    )
    assert not thinks_by_default(marked)
    rules = find_rules(Templates(marked, marked))
    assert (rules.left, rules.right, rules.behind_answer) == (
        None,
        None,
        "<end><user>question<end>",
    )


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("", ["no chat template"]),
        (ASK, []),  # renders no tools: a request with tools is refused
        (ASK + "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}", []),
        (
            "{% for m in messages %}{% if m.role != ['user', 'assistant'][loop.index0 % 2] %}"
            "{{ raise_exception('turns') }}{% endif %}{{ m.content }}{% endfor %}",
            ["in turns", "refuses system messages"],
        ),
        (
            "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
            ["leaves system messages out"],
        ),
    ],
)
def test_a_user_gets_a_note_of_what_a_template_does_not_take(template: str, told: list[str], tmp_path: Path) -> None:
    notes = find_notes(Templates(template, template), tmp_path)
    assert len(notes) == len(told)
    assert all(part in note for part, note in zip(told, notes, strict=True))


@pytest.mark.parametrize("adds", [True, False])
def test_a_user_gets_a_note_of_a_second_beginning_of_sequence(adds: bool, tmp_path: Path) -> None:
    words = {"<s>": 0, "</s>": 1, "question": 2}
    tokenizer = Tokenizer(WordLevel(words, unk_token="</s>"))
    tokenizer.pre_tokenizer = Whitespace()
    if adds:
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", words["<s>"])])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(tmp_path)
    template = "{{ bos_token }}" + ASK + "{{ tools }}"
    notes = find_notes(Templates(template, template), tmp_path)
    assert [note for note in notes if "begin a text with <s>" in note] == [*notes] * adds
    assert len(notes) == adds
