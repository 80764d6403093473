"""Names of base models that mean no folder."""

from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from art_server.errors import InvalidInput
from art_server.store.base_models import TINY_DIR, find_base_model, find_folder
from tests.refusals import refused


@pytest.mark.parametrize("name", ["~0", "~nobody-here/x", "a\0b", "x" * 1024, "\ud800", "-"])
def test_a_name_that_no_folder_can_have_is_an_unknown_model(name: str, tmp_path: Path) -> None:
    assert find_folder(name) is None
    with refused(InvalidInput, "unknown_base_model", "base_model"):
        find_base_model(name, tmp_path)


@pytest.mark.parametrize(("name", "meant"), [("art-tiny", "art/tiny"), ("smolm2", "smollm2")])
def test_a_misspelt_name_of_ours_is_answered_with_the_right_one(name: str, meant: str, tmp_path: Path) -> None:
    with refused(InvalidInput, "unknown_base_model", "base_model") as caught:
        find_base_model(name, tmp_path)
    assert f"Did you mean '{meant}'?" in caught.value.message


def test_a_folder_is_found_below_the_home_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(TINY_DIR.parent))
    assert find_folder(f"~/{TINY_DIR.name}") == TINY_DIR == find_folder(str(TINY_DIR))


class HubError(Exception):
    """As of the hub's HTTP library, whose errors have no common base with ours."""


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_hub_that_fails_leaves_the_local_cache(
    is_cached: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def download(name: str, *, local_files_only: bool = False, **_: object) -> str:
        if local_files_only and is_cached:
            return str(TINY_DIR)
        if local_files_only:
            raise LocalEntryNotFoundError("nothing in the cache")
        raise HubError("the proxy closed the connection")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    if is_cached:
        assert find_base_model("some/model", tmp_path).path == TINY_DIR
        return
    with refused(InvalidInput, "unknown_base_model", "base_model") as caught:
        find_base_model("some/model", tmp_path)
    assert "the proxy closed the connection" in caught.value.message
