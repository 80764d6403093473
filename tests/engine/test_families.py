import json
from pathlib import Path

import pytest

from art_server.base_models import TINY_DIR, read_template
from art_server.engine.families import Parsers, choose_parsers, thinks_by_default
from art_server.ledger.template import find_rules

ASK = "{% for m in messages %}{{ m.content }}{% endfor %}"
QWEN3 = ASK + (  # thinks unless told not to
    "<tool_call>{% if add_generation_prompt %}{% if enable_thinking is defined and enable_thinking is false %}"
    "<think></think>{% endif %}{% endif %}"
)
OFF = ASK + "{% if enable_thinking %}<think>{% endif %}"


def folder(path: Path, template: str, model_type: str = "qwen3") -> Path:
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return path


@pytest.mark.parametrize(
    ("template", "model_type", "expected"),
    [
        (QWEN3, "qwen3", Parsers("hermes", "qwen3", {})),
        (OFF, "qwen3", Parsers("hermes", "qwen3", {"enable_thinking": False})),
        (ASK + "<tool_call>", "qwen2", Parsers("hermes", None, {})),
        (ASK + "<|python_tag|>", "llama", Parsers("llama3_json", None, {})),
        (ASK + "[TOOL_CALLS]", "mistral", Parsers("mistral", None, {})),
        (ASK, "gpt_oss", Parsers("openai", "openai_gptoss", {})),
        ("", "phi", Parsers("hermes", None, {})),
    ],
)
def test_parsers_are_chosen_by_family(
    tmp_path: Path, template: str, model_type: str, expected: Parsers
) -> None:
    assert choose_parsers(folder(tmp_path, template, model_type)) == expected


NAMED = [
    {"name": "default", "template": OFF},
    {"name": "tool_use", "template": ASK + "[TOOL_CALLS]"},
    {"name": "rag", "template": "rag"},
]


def test_templates_by_name_are_those_of_transformers(tmp_path: Path) -> None:
    """As Hermes 3 and Command R publish them: a list; and as transformers saves them: files."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": NAMED}))
    for _ in range(2):
        assert read_template(tmp_path) == OFF
        assert read_template(tmp_path, has_tools=True) == ASK + "[TOOL_CALLS]"
        assert choose_parsers(tmp_path) == Parsers("mistral", "qwen3", {"enable_thinking": False})
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
        (tmp_path / "chat_template.jinja").write_text(OFF)
        (tmp_path / "additional_chat_templates").mkdir(exist_ok=True)
        for each in NAMED[1:]:
            file = tmp_path / "additional_chat_templates" / f"{each['name']}.jinja"
            file.write_text(each["template"])
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").unlink()
    assert read_template(tmp_path, has_tools=True) == OFF


def test_rules_that_the_template_for_tools_does_not_share_are_not_assumed(tmp_path: Path) -> None:
    strips = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>"
        "{% if m.reasoning_content %}{{ m.reasoning_content }}{% endif %}{% endfor %}"
    )
    keeps = strips.replace(" | trim", "")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": "default", "template": strips}]})
    )
    alone = find_rules(tmp_path)
    assert (alone.left, alone.right, alone.keeps_before_user) == (None, None, True)
    named = [{"name": "default", "template": strips}, {"name": "tool_use", "template": keeps}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    both = find_rules(tmp_path)
    assert (both.left, both.right, both.keeps_before_user) == ("", "", True)
    assert both.behind_answer == alone.behind_answer == "<end><user>question<end>"


def test_the_embedded_model_does_not_think_unless_asked() -> None:
    assert choose_parsers(TINY_DIR) == Parsers("hermes", "qwen3", {"enable_thinking": False})


def test_a_template_that_cannot_be_rendered_is_taken_as_vllm_takes_it() -> None:
    assert thinks_by_default(
        "{{ raise_exception('no') }}{% if enable_thinking %}<think>{% endif %}"
    )


def test_a_template_with_loop_controls_is_rendered() -> None:
    template = (
        "{% for m in messages %}{% break %}{% endfor %}{% if enable_thinking %}<think>{% endif %}"
    )
    assert not thinks_by_default(template)


@pytest.mark.parametrize("template", ["{{ 1 + messages }}", "{% if %}", "{{ tools[0]['a'] }}"])
def test_any_error_of_a_template_counts_as_thinking(template: str) -> None:
    assert thinks_by_default(template)
