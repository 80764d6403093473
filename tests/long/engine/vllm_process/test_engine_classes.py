"""Whether vLLM serves adapters of a class, read from its sources, is what its classes say."""

import warnings

import pytest

from art_server.engine.inspection_process.engine_classes import engine_problem

with warnings.catch_warnings(action="ignore"):  # vLLM's and torch's own deprecations
    from vllm.model_executor.models import registry
    from vllm.model_executor.models.interfaces import supports_lora

BY_PLATFORM = {"DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration"}
"""vLLM has another class of these for CPUs, without adapters. The sources tell of all platforms."""
ALL = sorted({*registry._TEXT_GENERATION_MODELS, *registry._MULTIMODAL_MODELS} - BY_PLATFORM)


@pytest.mark.filterwarnings("ignore")  # of vLLM's imports
@pytest.mark.parametrize("architecture", ALL)
def test_what_the_sources_say_is_what_the_class_says(architecture: str) -> None:
    try:
        model_class = registry.ModelRegistry.models[architecture].load_model_cls()
    except ImportError:
        pytest.skip("this class imports a package that is not installed")
    assert (engine_problem(architecture) is None) == supports_lora(model_class)
