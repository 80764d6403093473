"""docs/howto/serve-elsewhere.md, and other programs of a user, in the environment of scripts/setup: unchanged, without art_server.

tests/engine/integration/test_howto.py compares the answers of an exported step with those of the server, tests/long/docs runs vLLM.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from art_server.store.base_models import TINY_DIR
from tests.pages import blocks

ADAPTER = """
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("agent-merged")
get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained("agent-lora")
"""


def run(program: str, folder: Path) -> str:
    (folder / "program.py").write_text(program)
    ran = subprocess.run([sys.executable, "program.py"], cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout


def test_the_snippets_of_transformers_and_peft_run(tmp_path: Path) -> None:
    (tmp_path / "agent-merged").symlink_to(TINY_DIR)
    merged, adapted = blocks("serve-elsewhere.md", "python")
    shown = 'print(tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))'
    answers = run("\n".join([ADAPTER, merged, 'BASE = "agent-merged"', adapted, shown]), tmp_path).splitlines()
    assert len(answers) == 2 and answers[0] == answers[1] != "", "an adapter that is not trained changes nothing"


@pytest.mark.parametrize(
    "program",
    [
        "import peft",
        "from transformers import AutoProcessor, Gemma3Processor, Qwen3ForCausalLM, Qwen3VLProcessor",
        "import torchvision.transforms.v2",
    ],
)
def test_a_users_own_imports_work(program: str, tmp_path: Path) -> None:
    run(program, tmp_path)
