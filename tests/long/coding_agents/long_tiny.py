"""art/tiny with a long context, whose calls of tools are JSON and nothing else.

A request to /v1/messages can have one grammar, a JSON schema, so a scripted call has to be JSON. And vLLM adds any call of a tool to
what a grammar permits, unless the tool parser has no grammar of its own. xLAM's has none, and reads `[{"name": ..., "arguments": {...}}]`.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from art_server.store.base_models import TINY_DIR

POSITIONS = 131_072
FLAGS = ["--max-seq-length", "65536", "--engine-arg", "tool_call_parser=xlam"]
"""Of a server with this base model."""
CALLS = """\
        {%- if message.tool_calls -%}
            {{- '[' -}}
            {%- for call in message.tool_calls -%}
                {%- set function = call.function or call -%}
                {{- '{"name": ' + function.name | tojson + ', "arguments": ' -}}
                {{- function.arguments if function.arguments is string else function.arguments | tojson -}}
                {{- '}' + ('' if loop.last else ', ') -}}
            {%- endfor -%}
            {{- ']' -}}
        {%- endif -%}
"""


def make_long_tiny(folder: Path) -> None:
    shutil.copytree(TINY_DIR, folder)
    change(folder / "config.json", max_position_embeddings=POSITIONS)
    change(folder / "tokenizer_config.json", model_max_length=POSITIONS)
    template = folder / "chat_template.jinja"
    before, _, rest = template.read_text().partition("        {%- for call in message.tool_calls or [] -%}\n")
    _, end, after = rest.partition("        {{- '<|im_end|>\\n' -}}\n")
    text = before + CALLS + end + after
    assert end and text.count("<tool_call>") == 1, "the template of art/tiny has changed"
    template.write_text(text.replace("<tool_call>\\n", "[").replace("\\n</tool_call>", "]"))


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
