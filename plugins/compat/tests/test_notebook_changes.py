"""The changes of `plugins/compat/scripts/notebooks` and its world, on texts of our own: no notebook is in this repository."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from tests.scripts import load_script

SCRIPT = Path(__file__).parents[1] / "scripts" / "notebooks"


@pytest.fixture(scope="module")
def notebooks() -> ModuleType:
    return load_script("plugins/compat/scripts/notebooks")


def test_commands_do_nothing_and_skipped_cells_are_named(notebooks: ModuleType) -> None:
    install = "if True:\n    !pip install \\\n        a b\n%%capture\nx = 7 % 2"
    work, changed = notebooks.prepare([install, "from unsloth import Thing"], "http://world")
    assert [cell["text"] for cell in work["cells"]] == ["if True:\n    pass\npass\nx = 7 % 2"]
    assert changed == ["without cell 2"]


def test_base_model_sizes_keys_and_addresses_change(notebooks: ModuleType) -> None:
    cell = (
        'import weave\nmake(base_model="some/model")\nNUM_STEPS = 1_000\n'
        'settings = {"num_epochs": 20, "rate": 1e-5}\nSOME_API_KEY = ""\n'
        'get("https://openrouter.ai/api/v1")'
    )
    work, changed = notebooks.prepare([cell], "http://world")
    assert work["cells"][0]["text"] == (
        'import weave\nmake(base_model="art/tiny")\nNUM_STEPS = 2\n'
        'settings = {"num_epochs": 1, "rate": 1e-5}\nSOME_API_KEY = "none"\n'
        'get("http://world/openrouter.ai/api/v1")'
    )
    assert work["stand_ins"] == ["weave"] and not work["needs_datasets"]
    assert changed == ["base model", "sizes", "keys", "addresses", "stand-ins for weave"]


def test_the_world_answers_in_the_schema_and_calls_tools(notebooks: ModuleType) -> None:
    world = notebooks.World()
    item = {"type": "object", "properties": {"task": {"type": "string"}}}
    schema = {"type": "object", "properties": {"tasks": {"type": "array", "items": item}}}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Generate 3 tasks"}]}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    url = f"{world.url}/openrouter.ai/api/v1/chat/completions"
    reply = httpx.post(url, json=body | {"response_format": form}).json()
    tasks = json.loads(reply["choices"][0]["message"]["content"])["tasks"]
    assert len(tasks) == 3 and all(task["task"] for task in tasks)
    call = {"name": "add", "arguments": {"a": 1, "b": 2}}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
    result = httpx.post(f"{world.url}/mcp", json=message).json()["result"]
    assert result["content"][0]["text"] == "a is 1. b is 2."
    assert world.asked == {"openrouter.ai", "mcp"}
    world.server.shutdown()
    world.server.server_close()
