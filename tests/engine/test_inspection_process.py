"""The process that reads what a base model is; tests/quick/store/test_base_facts.py reads it without one."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from art_server.errors import InvalidInput
from art_server.store import base_facts
from art_server.store.base_models import TINY_DIR


def test_the_process_prints_the_record_or_ends_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base_facts._kept_facts.cache_clear()
    monkeypatch.setattr(base_facts, "CACHE_DIR", tmp_path / "cache")
    shutil.copytree(TINY_DIR, tmp_path / "base", ignore=shutil.ignore_patterns("*.safetensors"))
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}")
    with ThreadPoolExecutor(2) as pool:  # a process for each
        own = pool.submit(base_facts.read_facts, tmp_path / "base")
        broken = pool.submit(base_facts.read_facts, tmp_path / "base", file)
    facts = own.result()
    assert (facts.model_type, facts.problem, facts.parsers.tool) == ("qwen3", None, "hermes")
    with pytest.raises(InvalidInput, match=r"mine\.jinja"):
        broken.result()
