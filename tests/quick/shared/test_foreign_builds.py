"""Packages that were built for CUDA, beside torch's CPU build, keep no process of ours from importing vLLM and transformers."""

import subprocess
import sys
from pathlib import Path

import pytest

from art_server.shared.foreign_builds import foreign_builds


@pytest.mark.parametrize(
    ("versions", "foreign"),
    [
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.11.0"}, {"torchvision", "torchaudio"}),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu", "torchcodec": "0.17.0"}, {"torchcodec"}),
        ({"torch": "2.13.0+cpu"}, set()),
        ({"torch": "2.13.0", "torchvision": "0.28.0"}, set()),
        ({"torch": "2.13.0+cu130", "torchvision": "0.28.0+cu130"}, set()),
        ({"torchvision": "0.28.0"}, set()),
    ],
)
def test_another_build_than_a_cpus_torch_is_foreign(versions: dict[str, str], foreign: set[str]) -> None:
    assert foreign_builds(versions) == foreign


PROGRAM = """
import art_server, importlib.util, transformers.audio_utils
assert [importlib.util.find_spec(name) for name in ("torchaudio", "torchcodec")] == [None, None]
import peft, torchvision.transforms.v2, vllm.multimodal.audio
from transformers import Gemma3Processor, Qwen3ForCausalLM, Qwen3VLProcessor
try:
    import torchaudio
except ModuleNotFoundError:
    print("all imported")
"""


def test_a_process_of_ours_imports_what_pip_installs(tmp_path: Path) -> None:
    """The packages for sound as PyPI has them: their code fails with an error that nobody catches."""
    for name, version in {"torchaudio": "2.11.0", "torchcodec": "0.17.0"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (tmp_path / "program.py").write_text(PROGRAM)  # Python searches its folder first
    ran = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "all imported\n"), ran.stderr[-2000:]
