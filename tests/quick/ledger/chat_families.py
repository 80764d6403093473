"""Families of chat templates on the embedded tokenizer: twelve of all kinds, and those that think."""

import functools
import importlib.util
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import jinja2
import pytest
from jinja2.ext import loopcontrols
from tokenizers import Tokenizer

from art_server.store.base_models import TINY_DIR

Message = dict[str, Any]
CHATML_PLAIN = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + m.content -}}"
    "{%- for call in m.tool_calls or [] -%}{{- '\n<tool_call>\n{\"name\": ' + call.function.name | tojson -}}"
    "{{- ', \"arguments\": ' + call.function.arguments | tojson + '}\n</tool_call>' -}}{%- endfor -%}"
    "{{- '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
MISTRAL = (
    "{{- '<s>' -}}{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{- m.content + '</s>' -}}"
    "{%- else -%}{{- '[INST]' + m.content + '[/INST]' -}}{%- endif -%}{%- endfor -%}"
)
DEEPSEEK = (
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{- m.content + '<｜end▁of▁sentence｜>' -}}"
    "{%- else -%}{{- '<｜User｜>' + m.content + '<｜Assistant｜>' -}}{%- endif -%}{%- endfor -%}"
)
PHI4 = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant<|im_sep|>' -}}{%- endif -%}"
)
KIMI = (
    "{%- for m in messages -%}{{- '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + m.content + '<|im_end|>' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_assistant|>assistant<|im_middle|>' -}}{%- endif -%}"
)
"""By the rules of families whose templates no installed package brings."""


@dataclass(frozen=True)
class Family:
    """A chat template on the embedded tokenizer with the family's special tokens."""

    template: str
    """A file of TRL, or the template itself."""
    header: str
    """What opens an assistant's turn."""
    end: str
    """What ends it in a rendering."""
    sampled_end: str = ""
    """What the policy ends with, where that is another token."""
    eos: tuple[str, ...] = ()
    specials: tuple[str, ...] = ()
    strips: bool = False
    thinks: bool = False
    calls: bool = False
    before: str = ""
    """What the policy writes in front of an answer."""

    @functools.cached_property
    def text(self) -> str:
        if "{" in self.template:
            return self.template
        spec = importlib.util.find_spec("trl")
        if spec is None or not spec.submodule_search_locations:
            pytest.skip("TRL brings this family's template")
        folder = Path(spec.submodule_search_locations[0]) / "chat_templates"
        return (folder / f"{self.template}.jinja").read_text()

    @functools.cached_property
    def folder(self) -> Path:
        tokenizer = Tokenizer.from_file(str(TINY_DIR / "tokenizer.json"))
        names = [self.end, self.sampled_end, *self.eos, *self.specials, "<think>", "</think>"]
        tokenizer.add_special_tokens([name for name in names if name])
        folder = Path(tempfile.mkdtemp())
        tokenizer.save(str(folder / "tokenizer.json"))
        ends = [self.sampled_end or self.end, *self.eos]
        ids = [tokenizer.token_to_id(end) for end in ends]
        (folder / "config.json").write_text(json.dumps({"eos_token_id": ids}))
        (folder / "chat_template.jinja").write_text(self.text)
        return folder

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    @functools.cached_property
    def compiled(self) -> jinja2.Template:
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = lambda text: (_ for _ in ()).throw(ValueError(text))
        environment.globals["strftime_now"] = lambda _: "today"
        environment.filters["tojson"] = lambda value, **_: json.dumps(value)
        return environment.from_string(self.text)

    def render(self, messages: Sequence[Message]) -> str:
        return self.compiled.render(messages=messages, add_generation_prompt=True, bos_token="", eos_token=self.end)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def __hash__(self) -> int:
        return hash(self.template)


class Marks(TypedDict):
    """Of `Family`."""

    header: str
    end: str


CHATML: Marks = {"header": "<|im_start|>assistant\n", "end": "<|im_end|>"}


FAMILIES = {
    "Qwen3": Family("qwen3", **CHATML, thinks=True, calls=True),
    "Qwen2.5": Family("qwen2_5", **CHATML, calls=True),
    "Llama 3": Family(
        "llama3",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
        specials=("<|start_header_id|>", "<|end_header_id|>"),
        strips=True,
    ),
    "Gemma 3": Family("gemma3", "<start_of_turn>model\n", "<end_of_turn>", strips=True),
    "GLM-4.5": Family(
        "glm4moe",
        "<|assistant|>",
        "<|user|>",
        eos=("<|endoftext|>", "<|observation|>"),
        specials=("<|assistant|>", "<|system|>", "[gMASK]", "<sop>"),
        strips=True,
        thinks=True,
        before="\n",
    ),
    "gpt-oss": Family(
        "gptoss",
        "<|start|>assistant",
        "<|end|>",
        sampled_end="<|return|>",
        specials=("<|start|>", "<|channel|>", "<|message|>"),
        before="<|channel|>final<|message|>",
    ),
    "DeepSeek": Family(
        DEEPSEEK, "<｜Assistant｜>", "<｜end▁of▁sentence｜>", specials=("<｜User｜>", "<｜Assistant｜>")
    ),
    "Mistral": Family(MISTRAL, "[/INST]", "</s>", specials=("<s>", "[INST]", "[/INST]")),
    "Phi-4": Family(PHI4, "<|im_start|>assistant<|im_sep|>", "<|im_end|>", specials=("<|im_sep|>",)),
    "SmolLM": Family(CHATML_PLAIN, **CHATML),
    "Kimi": Family(
        KIMI,
        "<|im_assistant|>assistant<|im_middle|>",
        "<|im_end|>",
        specials=("<|im_assistant|>", "<|im_middle|>", "<|im_user|>"),
    ),
    "Hermes": Family(CHATML_PLAIN, **CHATML, calls=True),
}

SEED = (
    "{%- for m in messages -%}{{- '<seed:bos>' + m.role + '\n' -}}"
    "{%- if m.reasoning_content -%}{{- '<seed:think>\n' + m.reasoning_content + '\n</seed:think>\n' -}}{%- endif -%}"
    "{{- m.content -}}{%- for call in m.tool_calls or [] -%}"
    "{{- '\n<seed:tool_call>' + call.function.name + call.function.arguments | tojson + '</seed:tool_call>' -}}"
    "{%- endfor -%}{{- '<seed:eos>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<seed:bos>assistant\n' -}}{%- endif -%}"
)
SMOLLM3 = CHATML_PLAIN.replace(
    "{%- endif -%}",
    "{%- if enable_thinking is false -%}{{- '<think>\n\n</think>\n' -}}{%- endif -%}{%- endif -%}",
)
MAGISTRAL = (
    "{{- '<s>' -}}{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
    "{%- if m.reasoning_content -%}{{- '[THINK]' + m.reasoning_content + '[/THINK]' -}}{%- endif -%}{{- m.content -}}"
    "{%- for call in m.tool_calls or [] -%}"
    "{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson -}}{%- endfor -%}"
    "{{- '</s>' -}}{%- else -%}{{- '[INST]' + m.content + '[/INST]' -}}{%- endif -%}{%- endfor -%}"
)
HUNYUAN = (
    "{{- '<｜hy_begin｜>' -}}{%- for m in messages -%}{%- if m.role == 'assistant' -%}{%- set answer = m.content -%}"
    "{%- if '<answer>' in answer and not loop.last -%}"
    "{%- set answer = answer.split('<answer>')[-1].split('</answer>')[0].strip() -%}{%- endif -%}"
    "{%- if '</think>' in answer -%}"
    "{{- '<think>\n' + answer.split('</think>')[0].split('<think>')[-1].strip() + '\n</think>\n' -}}"
    "{%- set answer = answer.split('</think>')[-1].strip() -%}{%- endif -%}"
    "{%- if '<answer>' in answer -%}"
    "{{- '<answer>\n' + answer.split('<answer>')[-1].split('</answer>')[0].strip() + '\n</answer>' -}}"
    "{%- else -%}{{- answer -}}{%- endif -%}"
    "{%- for call in m.tool_calls or [] -%}{{- '<tool_call>' + call.function.name + '</tool_call>' -}}{%- endfor -%}"
    "{{- '<｜hy_eos｜>' -}}{%- else -%}{{- m.role + m.content + '<｜hy_sep｜>' -}}{%- endif -%}{%- endfor -%}"
)
INTERLEAVED = (
    "{%- for m in messages -%}{{- ']~b]' + m.role + '\n' -}}{%- set text = m.content -%}"
    "{%- if m.role == 'assistant' and '</think>' in text -%}"
    "{%- set text = text.split('</think>')[-1].strip('\n') -%}"
    "{{- '<think>\n' + m.content.split('</think>')[0].split('<think>')[-1].strip('\n') + '\n</think>\n\n' -}}"
    "{%- endif -%}{{- text -}}{%- for call in m.tool_calls or [] -%}"
    "{{- '\n<minimax:tool_call>' + call.function.name + '</minimax:tool_call>' -}}{%- endfor -%}{{- '[e~[\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- ']~b]assistant\n<think>\n' -}}{%- endif -%}"
)
QWEN: Marks = {"header": "<|im_start|>assistant\n<think>\n", "end": "<|im_end|>"}
DEEPSEEK_MARKS = ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁outputs▁end｜>")

THINKING = {
    "Qwen3": FAMILIES["Qwen3"],
    "Qwen3.5": Family("qwen3_5_think", **QWEN),
    "Qwen3.5 without thinking": Family("qwen3_5_nothink", **CHATML),
    "Qwen3.6": Family("qwen3_6", **QWEN),
    "Qwen3.8": Family("qwen3_8", **QWEN),
    "DeepSeek-R1": Family(
        "deepseek_r1_distill", "<｜Assistant｜><think>\n", "<｜end▁of▁sentence｜>", specials=DEEPSEEK_MARKS
    ),
    "GLM-4.5": FAMILIES["GLM-4.5"],
    "LFM2.5": Family("lfm2_2_5", **CHATML),
    "Nemotron 3 Nano": Family("nemotron_3_nano", **QWEN),
    "Nemotron 3 Super": Family("nemotron_3_super", **QWEN),
    "Nemotron 3 Ultra": Family("nemotron_3_ultra", **QWEN),
    "MiniMax": Family(INTERLEAVED, "]~b]assistant\n<think>\n", "[e~[", specials=("]~b]",)),
    "Hunyuan": Family(HUNYUAN, "", "<｜hy_eos｜>", specials=("<｜hy_sep｜>", "<answer>", "</answer>")),
    "SmolLM3": Family(SMOLLM3, **CHATML),
    "Seed-OSS": Family(
        SEED, "<seed:bos>assistant\n", "<seed:eos>", specials=("<seed:bos>", "<seed:think>", "</seed:think>")
    ),
    "Magistral": Family(MAGISTRAL, "[/INST]", "</s>", specials=("[INST]", "[/INST]", "[THINK]", "[/THINK]")),
    "Gemma 4": Family(
        "gemma4_v5", "<|turn>model\n", "<turn|>", specials=("<|turn>", "<|channel>", "<channel|>", "<|tool_call>")
    ),
}
"""Families whose templates write or read thinking. The last seven but Gemma 4 by the rules of their families."""


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(content: str, thinking: str | None = None, calls: Sequence[Any] = ()) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if thinking is not None:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": name, "arguments": value}} for name, value in calls
        ]
    return message
