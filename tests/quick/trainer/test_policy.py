import random
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    HyperCLOVAXConfig,
    MiniCPM3Config,
    OPTConfig,
    PreTrainedConfig,
)

from art_protocol.wire import LoRAConfig
from art_server.shared.trainer_messages import Batch
from art_server.trainer.batches import MicroBatch, make_micro_batches, make_train_batch
from art_server.trainer.policy import ADAPTER_FILE, Policy

PROMPTS = torch.randint(0, 128, (3, 11), generator=torch.Generator().manual_seed(7))


def usual(policy: Policy) -> Policy:
    """Whole models are called here as anybody would call them, without a forest."""
    policy.use_trees(False)
    return policy


def one_micro_batch(batch: Batch, shared: bool = True) -> MicroBatch:
    (micro_batch,) = make_micro_batches(make_train_batch(batch).sequences, 10_000, shared=shared)
    return micro_batch


def plain_logprobs(model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Prediction by prediction, without tree or padding, through the model's own logits: N."""
    values = []
    for token_ids, target in zip(visible_tokens(batch), batch.targets_N.tolist(), strict=True):
        values.append(torch.log_softmax(plain_logits(model, token_ids), -1)[target])
    return torch.stack(values)


def plain_logits(model: torch.nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    """After the last token, under the attention of transformers: V."""
    whole = model.get_base_model() if isinstance(model, PeftModel) else model
    base = cast(Any, whole)  # Any: transformers' switches are untyped
    implementation = base.config._attn_implementation
    base.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(input_ids=token_ids[None]).logits[0, -1].float()
    base.set_attn_implementation(implementation)
    return logits


def visible_tokens(batch: MicroBatch) -> list[torch.Tensor]:
    """What each prediction sees."""
    forest = batch.forest
    indices = torch.arange(forest.num_tokens)
    return [
        forest.token_ids_T[(indices <= index) & (index < forest.ends_T)] for index in batch.forest_indices_N.tolist()
    ]


def test_logprob_of_a_token_is_the_models_own_at_the_position_before(
    policy: Policy, adapter_dir: Path, make_batch
) -> None:
    policy.load_adapter(LoRAConfig(), adapter_dir)
    batch = one_micro_batch(make_batch(1))
    logprobs_N, _ = policy.logprobs(batch)
    assert logprobs_N.dtype == torch.float32
    torch.testing.assert_close(logprobs_N.detach(), plain_logprobs(policy.model, batch), atol=1e-5, rtol=1e-5)


def test_reference_is_the_base_and_leaves_the_adapter_on(
    policy: Policy, adapter_dir: Path, base_dir: Path, make_batch
) -> None:
    policy.load_adapter(LoRAConfig(), adapter_dir)
    batch = one_micro_batch(make_batch(2))
    before_N, _ = policy.logprobs(batch)
    reference_N = policy.reference_logprobs(batch)
    after_N, _ = policy.logprobs(batch)

    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    torch.testing.assert_close(reference_N, plain_logprobs(base, batch), atol=1e-5, rtol=1e-5)
    assert not reference_N.requires_grad
    assert (reference_N - before_N).abs().max() > 0.01
    torch.testing.assert_close(before_N, after_N, atol=0, rtol=0)


def test_entropy_is_that_of_the_predicting_distribution(policy: Policy, adapter_dir: Path, make_batch) -> None:
    policy.load_adapter(LoRAConfig(), adapter_dir)
    batch = one_micro_batch(make_batch(3, num_groups=1))
    _, entropies_N = policy.logprobs(batch)
    logits_NV = torch.stack([plain_logits(policy.model, token_ids) for token_ids in visible_tokens(batch)])
    expected_N = torch.distributions.Categorical(logits=logits_NV).entropy()
    torch.testing.assert_close(entropies_N, expected_N, atol=1e-5, rtol=1e-5)


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**SMALL, head_dim=16, final_logit_softcapping=2.0, sliding_window=4),
        GraniteConfig(**SMALL, logits_scaling=8.0),
        CohereConfig(**SMALL, logit_scale=0.0625),
        HyperCLOVAXConfig(**SMALL, logits_scaling=0.125),
        MiniCPM3Config(
            **{**SMALL, "num_key_value_heads": 2},
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=8,
            dim_model_base=8,
        ),
    ],
    ids=["soft-capped", "divided", "multiplied", "multiplied by a scaling", "divided before"],
)
def test_models_that_transform_their_logits_keep_doing_so(config: PreTrainedConfig, tmp_path: Path, make_batch) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    policy = Policy(str(tmp_path), torch.float32)
    policy.init_adapter(LoRAConfig(), seed=0)
    policy.use_trees("attn_logit_softcapping" not in config.to_dict())
    batch = one_micro_batch(make_batch(4), policy.shares_prefixes)
    logprobs_N, _ = policy.logprobs(batch)
    torch.testing.assert_close(logprobs_N.detach(), plain_logprobs(policy.model, batch), atol=1e-5, rtol=1e-5)


def test_recomputed_layers_have_no_dropout(tmp_path: Path, make_batch) -> None:
    """Gradient checkpointing puts OPT's layers into training mode."""
    config = OPTConfig(**{**SMALL, "vocab_size": 128}, ffn_dim=48, word_embed_proj_dim=32, dropout=0.5)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    policy = Policy(str(tmp_path), torch.float32)
    policy.init_adapter(LoRAConfig(), seed=0)
    batch = one_micro_batch(make_batch(4), policy.shares_prefixes)
    expected_N, _ = policy.logprobs(batch)
    policy.use_checkpointing(True)
    torch.testing.assert_close(policy.logprobs(batch)[0], expected_N)


def test_fresh_adapter_changes_nothing_and_is_the_same_for_the_same_seed(
    policy: Policy, base_dir: Path, tmp_path: Path
) -> None:
    contents = []
    for name, seed in [("a", 3), ("b", 3), ("c", 4)]:
        random.seed(name)
        torch.manual_seed(random.randrange(1000))
        policy.init_adapter(LoRAConfig(rank=4), seed=seed)
        (tmp_path / name).mkdir()
        policy.save_adapter(tmp_path / name)
        contents.append((tmp_path / name / ADAPTER_FILE).read_bytes())
    assert contents[0] == contents[1] != contents[2]
    assert all(not tensor.any() for name, tensor in policy.parameters.items() if "lora_B" in name)
    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(
            usual(policy).model(input_ids=PROMPTS).logits,
            base(input_ids=PROMPTS).logits,
            atol=0,
            rtol=0,
        )


def test_saved_folder_is_a_peft_adapter_with_the_policys_logits(
    policy: Policy, adapter_dir: Path, base_dir: Path
) -> None:
    policy.load_adapter(LoRAConfig(), adapter_dir)
    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, str(adapter_dir)).eval()
    with torch.no_grad():
        torch.testing.assert_close(
            usual(policy).model(input_ids=PROMPTS).logits,
            loaded(input_ids=PROMPTS).logits,
            atol=0,
            rtol=0,
        )
    assert loaded.peft_config["default"].base_model_name_or_path == str(base_dir)
    assert sorted(path.name for path in adapter_dir.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_adapter_covers_every_linear_layer_but_the_head(adapter_dir: Path) -> None:
    names = list(load_file(adapter_dir / ADAPTER_FILE))
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in names}
    assert layers == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert len(names) == 2 * 7 * 2


def test_adapter_of_other_layers_is_refused_and_the_policy_goes_on(policy: Policy, adapter_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors"):
        policy.load_adapter(LoRAConfig(target_modules=["q_proj"]), adapter_dir)
    with pytest.raises(RuntimeError, match="q_proj"):
        policy.load_adapter(LoRAConfig(rank=2), adapter_dir)
    policy.load_adapter(LoRAConfig(), adapter_dir)


def test_token_outside_the_vocabulary_is_refused(policy: Policy, make_batch) -> None:
    policy.init_adapter(LoRAConfig(), seed=0)
    batch = one_micro_batch(make_batch(5))
    batch.forest.token_ids_T[0] = 128
    with pytest.raises(ValueError, match="token 128"):
        policy.logprobs(batch)


def test_pickled_base_weights_are_refused(base_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((base_dir / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(OSError, match="safetensors"):
        Policy(str(tmp_path))


def test_adapter_over_a_bfloat16_base_is_float32(base_dir: Path, tmp_path: Path, make_batch) -> None:
    policy = Policy(str(base_dir), torch.bfloat16)
    policy.init_adapter(LoRAConfig(), seed=0)
    assert {parameter.dtype for parameter in policy.parameters.values()} == {torch.float32}
    batch = one_micro_batch(make_batch(6))
    logprobs_N, _ = policy.logprobs(batch)
    assert logprobs_N.dtype == torch.float32
    logprobs_N.sum().backward()
    assert all(parameter.grad is not None for parameter in policy.parameters.values())
    policy.save_adapter(tmp_path)
    saved = load_file(tmp_path / ADAPTER_FILE)
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
