import json
from pathlib import Path

import pytest

from art_server.base_models import TINY_DIR
from art_server.engine.families import Parsers, choose_parsers, thinks_by_default

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
