"""Whether vLLM serves adapters of a class, read from its sources, is what its classes say."""

import warnings

import pytest

from art_server.inspection.engine_classes import engine_problem

with warnings.catch_warnings(action="ignore"):  # vLLM's and torch's own deprecations
    from vllm.model_executor.models import registry
    from vllm.model_executor.models.interfaces import supports_lora

BY_PLATFORM = {"DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration"}
"""vLLM has another class of these for CPUs, without adapters. The sources tell of all platforms."""
ALL = sorted({*registry._TEXT_GENERATION_MODELS, *registry._MULTIMODAL_MODELS} - BY_PLATFORM)
QUICK = (
    "Cohere2MoeForCausalLM",
    "DeepseekV32ForCausalLM",
    "Gemma3nForConditionalGeneration",
    "GlmMoeDsaForCausalLM",
    "KimiLinearForCausalLM",
    "Lfm2MoeForCausalLM",
    "NemotronHForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3NextForCausalLM",
    "StableLmForCausalLM",
)


@pytest.mark.filterwarnings("ignore")  # of vLLM's imports
@pytest.mark.parametrize(
    "architecture",
    [*QUICK, *(pytest.param(each, marks=pytest.mark.long) for each in ALL if each not in QUICK)],
)
def test_what_the_sources_say_is_what_the_class_says(architecture: str) -> None:
    try:
        made = registry.ModelRegistry.models[architecture].load_model_cls()
    except ImportError as error:
        assert architecture not in QUICK, error
        pytest.skip("this class imports a package that is not installed")
    assert (engine_problem(architecture) is None) == supports_lora(made)


def test_classes_that_vllm_no_longer_has_are_named() -> None:
    for architecture in registry._PREVIOUSLY_SUPPORTED_MODELS:
        assert engine_problem(architecture) == f"vLLM no longer serves its class {architecture}"
    assert engine_problem("OfTomorrowForCausalLM") is None
