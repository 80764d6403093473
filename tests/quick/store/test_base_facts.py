"""The record of a base model: in a process of its own, kept by the content of the files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from art_server.errors import InvalidInput
from art_server.store import base_facts
from art_server.store.base_facts import read_facts
from art_server.store.base_models import TINY_DIR, BaseModel

TINY = json.loads((TINY_DIR / "config.json").read_text())


@pytest.fixture(autouse=True)
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of records, empty."""
    base_facts._kept_facts.cache_clear()
    monkeypatch.setattr(base_facts, "CACHE_DIR", tmp_path / "cache")
    return tmp_path / "cache" / "facts"


def bare(folder: Path, **config: object) -> BaseModel:
    """A base model of which only config.json is known: art/tiny's, with some fields changed."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY | config))
    return BaseModel("a base", folder)


@pytest.mark.usefixtures("in_process")
def test_facts_are_kept_by_the_content_of_the_files(tmp_path: Path, nothing_kept: Path) -> None:
    folder = bare(tmp_path / "base").path
    facts = read_facts(folder)
    assert (facts.vocabulary, facts.max_positions) == (
        TINY["vocab_size"],
        TINY["max_position_embeddings"],
    )
    (kept,) = nothing_kept.iterdir()
    kept.write_text(kept.read_text().replace(f'"vocabulary": {facts.vocabulary}', '"vocabulary": 7'))
    base_facts._kept_facts.cache_clear()
    assert read_facts(folder).vocabulary == 7, "from the disk"
    bare(folder, vocab_size=1500)
    assert read_facts(folder).vocabulary == 1500


def test_a_damaged_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(InvalidInput) as refused:
            read_facts(folder)
        assert (refused.value.code, refused.value.param) == ("unknown_base_model", "base_model")


def test_a_chat_template_of_a_file_takes_the_place_of_the_models_own(tmp_path: Path, in_process: None) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}")
    own = bare(tmp_path / "base")
    assert [note for note in own.facts.notes if "--chat-template FILE" in note]
    mine = replace(own, template=file).facts
    assert mine.notes == ()
    assert mine.parsers.tool is None
    assert mine.rules.behind_answer == "<end><user>question<end>"


def test_the_shipped_record_of_art_tiny_is_what_an_inspection_says(in_process: None) -> None:
    assert read_facts(TINY_DIR) == base_facts.inspected_tiny_facts(), "run scripts/pages"
