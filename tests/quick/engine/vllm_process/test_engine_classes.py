"""Whether vLLM serves adapters of a class, read from its sources, is what its classes say."""

import warnings

import pytest

from art_server.engine.inspection_process.engine_classes import engine_problem

with warnings.catch_warnings(action="ignore"):  # vLLM's and torch's own deprecations
    from vllm.model_executor.models import registry
    from vllm.model_executor.models.interfaces import supports_lora

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
@pytest.mark.parametrize("architecture", QUICK)
def test_what_the_sources_say_is_what_the_class_says(architecture: str) -> None:
    model_class = registry.ModelRegistry.models[architecture].load_model_cls()
    assert (engine_problem(architecture) is None) == supports_lora(model_class)


def test_classes_that_vllm_no_longer_has_are_named() -> None:
    for architecture in registry._PREVIOUSLY_SUPPORTED_MODELS:
        assert engine_problem(architecture) == f"vLLM no longer serves its class {architecture}"
    assert engine_problem("OfTomorrowForCausalLM") is None
