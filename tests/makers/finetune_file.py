"""A finetuning file, and the folder that it is run in."""

from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import json, os, sys, urllib.request
messages = [{"role": "user", "content": json.load(sys.stdin)["question"]}]
body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": 8}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""
"""A workflow of the kind `command`, of a few imports: it is started once for each rollout."""


def finetune_file(backend: dict[str, Any], dataset: str = "rows.json", **changes: Any) -> dict[str, Any]:
    """Trains `agent.py` on rows. `changes` replace values by their names, with "__" for each dot."""
    tree: dict[str, Any] = {
        "workflow": {"_type": "agent.py:answer"},
        "eval": {
            "general": {"dataset": {"_type": Path(dataset).suffix[1:], "file_path": dataset}},
            "evaluators": {"reward": {"_type": "agent.py:score"}},
        },
        "trajectory_builders": {"b": {"_type": "openpipe_art_traj_builder", "num_generations": 2}},
        "trainer_adapters": {
            "a": {
                "_type": "openpipe_art_trainer_adapter",
                "backend": {"name": "agent", "project": "demo", "base_model": "art/tiny", **backend},
            }
        },
        "trainers": {"t": {"_type": "openpipe_art_trainer"}},
        "finetuning": {
            "enabled": True,
            "trainer": "t",
            "trajectory_builder": "b",
            "trainer_adapter": "a",
            "reward_function": {"name": "reward"},
            "num_epochs": 2,
            "output_dir": "out",
        },
    }
    for name, value in changes.items():
        *path, last = name.split("__")
        inner = tree
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return tree


def enter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a folder the current directory of a test, without variables of an earlier run."""
    monkeypatch.chdir(folder)
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL", "ART_SERVER_URL"):
        monkeypatch.setenv(name, "")  # so that it is as before when the test ends
        monkeypatch.delenv(name)
