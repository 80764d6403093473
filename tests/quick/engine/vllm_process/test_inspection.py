"""Where vLLM inspects the class of a model."""

import os

import pytest

from art_server.engine.vllm_process.vllm_plugin import inspect_models_here


def test_a_model_s_class_is_inspected_in_the_same_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models import registry  # takes seconds

    monkeypatch.setattr(registry, "_run_in_subprocess", registry._run_in_subprocess)  # restores it in the end
    inspect_models_here()
    assert registry._run_in_subprocess(os.getpid) == os.getpid()
    monkeypatch.delattr(registry, "_run_in_subprocess")
    with pytest.raises(ImportError, match="no longer inspects"):
        inspect_models_here()
