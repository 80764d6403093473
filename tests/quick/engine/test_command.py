"""How vLLM is started."""

import json
import os
import sys
from pathlib import Path

import pytest

from art_server.engine.command import LARGE_BYTES, engine_command, engine_environment
from art_server.engine.device.plan import make_memory_plan
from art_server.settings import ServerConfig
from art_server.shared import switches
from art_server.store.base_facts import Facts
from art_server.store.base_models import TINY_DIR, BaseModel
from tests.makers.toy_models import make_model
from tests.quick.engine.device.cards import card, demand

TINY = BaseModel("art/tiny", TINY_DIR)
BIND = "VLLM_CPU_OMP_THREADS_BIND"


def value_of(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def test_short_prompts_fill_blocks_of_a_cpus_cache() -> None:
    config = ServerConfig(path=Path("x"))
    assert value_of(engine_command(config, TINY, "cpu", Path("y")), "--block-size") == "32"
    assert "--block-size" not in engine_command(config, TINY, "cuda", Path("y"))
    with_blocks = ServerConfig(path=Path("x"), engine_args={"block_size": "64"})
    arguments = engine_command(with_blocks, TINY, "cpu", Path("y"))
    assert value_of(arguments, "--block-size") == "64" and arguments.count("--block-size") == 1


def test_latent_attention_gets_the_kernels_that_take_float32_on_any_cpu() -> None:
    """vLLM's own choice on a CPU with AMX fails at the first request in float32: `expect weight to be bfloat16`."""
    config = ServerConfig(path=Path("x"))
    latent = BaseModel("latent", TINY_DIR)
    vars(latent)["facts"] = Facts(model_type="deepseek_v3", has_latent_attention=True)
    arguments = engine_command(config, latent, "cpu", Path("y"))
    assert value_of(arguments, "--attention-backend") == "CPU_MLA" and "--block-size" not in arguments
    assert "--attention-backend" not in engine_command(config, latent, "cuda", Path("y"))
    assert "--attention-backend" not in engine_command(config, TINY, "cpu", Path("y"))


def test_vllm_gets_by_how_much_queries_grow_with_the_position() -> None:
    """Which it reads from Mistral's own format only (tests/long/integration/family_engine.py compares them)."""
    config, growing = ServerConfig(path=Path("x")), BaseModel("growing", TINY_DIR)
    scaling = {"text_config": {"llama_4_scaling": {"beta": 0.1}}}
    vars(growing)["facts"] = Facts(model_type="mistral3", overrides=scaling)
    arguments = engine_command(config, growing, "cuda", Path("y"))
    assert json.loads(value_of(arguments, "--hf-overrides")) == scaling
    assert "--hf-overrides" not in engine_command(config, TINY, "cuda", Path("y"))


@pytest.mark.parametrize("other", ["params.json", "consolidated.safetensors"])
def test_a_folder_with_mistrals_format_is_served_in_the_hubs(other: str, tmp_path: Path) -> None:
    for file in TINY_DIR.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config, both = ServerConfig(path=Path("x")), BaseModel("both", tmp_path)
    flags = ("--config-format", "--load-format", "--tokenizer-mode")
    assert not set(flags) & set(engine_command(config, both, "cpu", Path("y")))
    (tmp_path / other).touch()
    arguments = engine_command(config, both, "cpu", Path("y"))
    assert [value_of(arguments, flag) for flag in flags] == ["hf", "safetensors", "hf"]


def test_a_message_names_no_image_that_the_engine_would_fetch() -> None:
    for device in ("cpu", "cuda"):
        arguments = engine_command(ServerConfig(path=Path("x")), TINY, device, Path("y"))
        assert "--language-model-only" in arguments


def test_on_cuda_the_context_is_what_the_cache_holds_unless_it_is_given() -> None:
    arguments = engine_command(ServerConfig(path=Path("x")), TINY, "cuda", Path("y"))
    assert value_of(arguments, "--max-model-len") == "auto"
    limited = ServerConfig(path=Path("x"), max_seq_length=2048)
    arguments = engine_command(limited, TINY, "cuda", Path("y"))
    assert value_of(arguments, "--max-model-len") == "2048"


@pytest.mark.parametrize("case", ["none", "sleep"])
def test_vllm_gets_its_share_of_the_plan_and_can_sleep_if_it_must(case: str) -> None:
    model, on = {"none": ("4B", "80 GB"), "sleep": ("8B", "24 GB")}[case]
    plan = make_memory_plan(card(on), demand(model))
    assert plan.handover == case and 0.05 < plan.utilization < 0.95
    arguments = engine_command(ServerConfig(path=Path("x")), TINY, "cuda", Path("y"), plan)
    assert float(value_of(arguments, "--gpu-memory-utilization")) == plan.utilization
    assert ("--enable-sleep-mode" in arguments) == (case == "sleep")


def test_of_a_mixture_only_attention_is_adapted(tmp_path: Path) -> None:
    mixture = BaseModel("a mixture", make_model("qwen3_moe", tmp_path / "base"))
    config = ServerConfig(path=Path("x"))
    arguments = engine_command(config, mixture, "cpu", Path("y"))
    start = arguments.index("--lora-target-modules") + 1
    assert arguments[start : start + 4] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert arguments[start + 4].startswith("--")
    assert engine_environment(config, mixture, "cpu", {})[switches.EXPERTS_SWITCH] == "1"
    assert "--lora-target-modules" not in engine_command(config, TINY, "cpu", Path("y"))
    assert switches.EXPERTS_SWITCH not in engine_environment(config, TINY, "cpu", {})


@pytest.mark.skipif(sys.platform != "linux", reason="cores are bound on Linux")
def test_a_large_model_gets_all_of_a_few_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3})
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.touch()
    os.truncate(weights, LARGE_BYTES + 1)
    large, config = BaseModel("large", tmp_path), ServerConfig(path=Path("x"))
    assert engine_environment(config, large, "cpu", {})[BIND] == "0,3"
    assert engine_environment(config, large, "cpu", {BIND: "auto"})[BIND] == "auto"
    assert BIND not in engine_environment(config, large, "cuda", {})
    parallel = ServerConfig(path=Path("x"), engine_args={"tensor_parallel_size": "2"})
    assert BIND not in engine_environment(parallel, large, "cpu", {})
    os.truncate(weights, LARGE_BYTES)
    assert BIND not in engine_environment(config, large, "cpu", {})
    os.truncate(weights, LARGE_BYTES + 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert BIND not in engine_environment(config, large, "cpu", {})


@pytest.mark.skipif(sys.platform != "linux", reason="cores are bound on Linux")
@pytest.mark.parametrize(
    ("cores", "bound", "is_one"),
    [
        ({0, 1}, None, True),  # vLLM leaves one of two cores to its other processes
        ({0, 1}, "auto", True),
        ({0, 1, 2}, None, False),
        ({0, 1}, "0,1", False),
        ({0, 1, 2, 3}, "3", True),
    ],
)
def test_a_worker_is_forked_only_where_one_thread_computes(
    cores: set[int], bound: str | None, is_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    inherited = {} if bound is None else {BIND: bound}
    environment = engine_environment(ServerConfig(path=Path("x")), TINY, "cpu", inherited)
    assert (switches.ONE_THREAD_SWITCH in environment) is is_one
    assert switches.ONE_THREAD_SWITCH not in engine_environment(ServerConfig(path=Path("x")), TINY, "cuda", inherited)


def test_control_tokens_in_messages_are_text_unless_a_flag_says_otherwise() -> None:
    config = ServerConfig()
    assert switches.RAW_SWITCH not in engine_environment(config, TINY, "cpu", {})
    raw = config.model_copy(update={"raw_special_tokens": True})
    assert switches.RAW_SWITCH in engine_environment(raw, TINY, "cpu", {})
