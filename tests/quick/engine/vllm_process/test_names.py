"""The installed vLLM has what the server takes from vLLM, and `art_server/shared/vllm_names.py` lists all that the server takes."""

import ast
from pathlib import Path

from art_server.shared.vllm_names import NAMES
from tests.vllm_sources import Sources, absences, installed_folder, replaced_functions, taken_from, taken_names

LISTED = {(module, name) for module, names in NAMES.items() for name in names}
OF_OTHERS = {
    ("vllm.entrypoints.serve.engine.protocol", "ErrorResponse.model_validate_json"),  # pydantic's
    ("vllm.lora.punica_wrapper.punica_cpu", "PunicaWrapperCPU.tokens_by_adapter"),  # ours
}
"""Attributes of vLLM's classes that are not vLLM's."""


def test_the_installed_vllm_has_all() -> None:
    assert absences(Sources(installed_folder())) == []


def test_the_list_has_what_the_server_takes() -> None:
    classes = {(module, name.partition(".")[0]) for module, name in LISTED}
    assert taken_names() - LISTED - classes == OF_OTHERS
    assert len(taken_names()) > 60 and len([use for use in replaced_functions() if use[2]]) >= 3


def test_a_new_use_of_vllm_is_seen() -> None:
    program = """
from vllm.v1.sample import sampler
from vllm.outputs import RequestOutput as Output
kind: Any = sampler.Sampler
kind.forward = Output.add
patch_target(kind, "compute", uses="topk")
"""
    assert taken_from(ast.parse(program)) == {
        ("vllm.outputs", "RequestOutput"),
        ("vllm.outputs", "RequestOutput.add"),
        ("vllm.v1.sample.sampler", "Sampler"),
        ("vllm.v1.sample.sampler", "Sampler.compute"),
        ("vllm.v1.sample.sampler", "Sampler.forward"),
    }


def test_a_name_that_vllm_lost_is_seen(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "base.py").write_text("class Base:\n    def __init__(self):\n        self.kept = 1\n")
    (tmp_path / "vllm" / "__init__.py").write_text(
        "from vllm.base import Base\nclass Kind(Base):\n    field: int = 0\n    def method(self, k): ...\n"
    )
    sources = Sources(tmp_path)
    has = {
        name: sources.has("vllm", name)
        for name in ("Base", "Kind.kept", "Kind.field", "Kind.method", "Kind.gone", "gone")
    }
    assert has == {name: "gone" not in name for name in has}
    assert sources.parameters("vllm", "Kind.method") == ["self, k"]
