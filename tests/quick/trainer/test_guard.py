"""Planted faults: a step's probe against an engine that shares no code with the trainer, in float32 and bfloat16."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.helpers import rescale_adapter_scale
from transformers import AutoConfig, AutoModelForCausalLM

from art_protocol.wire import LoRAConfig, TrainConfig
from art_server.shared.same_policy import find_fault, mismatch_limits
from art_server.shared.trainer_messages import Probe, TrainTask
from art_server.trainer.job import train
from art_server.trainer.policy import Policy
from tests.makers.first_steps import write_first_checkpoint

FAULTS = ("half alpha", "double alpha", "base weights", "another RoPE", "another kernel")


class Engine:
    """transformers' own forward pass with PEFT's adapter, computed in a number type, with a fault."""

    def __init__(self, base: Path, adapter: Path, dtype: str, fault: str | None):
        config = AutoConfig.from_pretrained(base)
        if fault == "another RoPE":
            config.rope_parameters["rope_theta"] /= 10
        model: Any = AutoModelForCausalLM.from_pretrained(base, config=config, dtype=getattr(torch, dtype))
        if fault == "another kernel":
            for layer in model.model.layers:
                layer.self_attn.scaling *= 1.15
        model = PeftModel.from_pretrained(model, str(adapter), autocast_adapter_dtype=False)
        self.model, self.fault = model.to(getattr(torch, dtype)).eval(), fault

    @torch.no_grad()
    def score(self, token_ids: list[int], factor: float = 1.0) -> list[float]:
        ids = torch.tensor([token_ids])
        wrong = {"half alpha": 0.5, "double alpha": 2.0, "base weights": 0.0}
        with rescale_adapter_scale(self.model, factor * wrong.get(self.fault or "", 1.0)):
            logprobs = self.model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        return logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist()


def seen(policy: Policy, folder: Path, batch: Any, dtype: str, fault: str | None, steps: int = 1) -> str | None:
    """What the probe shows after some honest steps of a fresh adapter."""
    limits = mismatch_limits((dtype, "float32"))
    assert limits is not None
    write_first_checkpoint(policy.base_model, LoRAConfig(), 0, folder / "0")
    probe: Probe | None = None
    for step in range(steps):
        task = TrainTask(
            lora=LoRAConfig(),
            in_dir=str(folder / str(step)),
            out_dir=str(folder / str(step + 1)),
            config=TrainConfig(learning_rate=1e-3),
            batch=batch,
            # Made long ago, so that the next step has one again.
            probe=probe and probe.model_copy(update={"made_at": 0.0}),
            # The batch's log-probabilities are random numbers.
            mismatch_limits=limits.model_copy(update={"wrong": 100.0}),
        )
        probe = train(policy, task, 4096, lambda _: None).probe
    assert probe is not None and probe.is_of_step
    engine = Engine(Path(policy.base_model), folder / str(steps), dtype, fault)
    scaled = engine.score(probe.token_ids, probe.factor) if probe.factor > 1 else []
    return find_fault(probe, engine.score(probe.token_ids), scaled, limits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught_at_the_first_step(
    policy: Policy, tmp_path: Path, make_batch, dtype: str, fault: str
) -> None:
    assert seen(policy, tmp_path, make_batch(0, max_length=40), dtype, fault) is not None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(2))
def test_an_honest_engine_is_not_suspected(policy: Policy, tmp_path: Path, make_batch, dtype: str, seed: int) -> None:
    batch = make_batch(seed, max_length=40)
    assert seen(policy, tmp_path, batch, dtype, None, steps=3) is None
