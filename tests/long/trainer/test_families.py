"""Each family of models trains a step, at toy size with random weights."""

from pathlib import Path

import pytest

from art_protocol.wire import LoRAConfig, TrainConfig
from art_server.shared.trainer_messages import TrainTask
from art_server.trainer.base import meta_model
from art_server.trainer.job import train
from art_server.trainer.layers import find_layers
from art_server.trainer.policy import Policy
from tests.makers.first_steps import write_first_checkpoint
from tests.makers.toy_models import FAMILIES, WITHOUT_TREES, make_model
from tests.quick.trainer.conftest import MakeBatch

LAYOUTS = ("qwen3_5", "gemma3", "gemma4 whose keys are values", "glm4_moe_lite", "nemotron_h", "falcon_h1")  # fmt: skip
"""Of PUBLISHED: several parts, latent attention, several kinds of layers."""


@pytest.mark.parametrize("family", [*FAMILIES, *LAYOUTS])
def test_a_step_moves_layers_that_the_engine_adapts(family: str, make_batch: MakeBatch, tmp_path: Path) -> None:
    base = make_model(family, tmp_path / "base")
    lora = LoRAConfig(rank=4)
    write_first_checkpoint(str(base), lora, 0, tmp_path / "0000")
    policy = Policy(str(base))
    task = TrainTask(
        lora=lora,
        in_dir=str(tmp_path / "0000"),
        out_dir=str(tmp_path / "0001"),
        config=TrainConfig(learning_rate=1e-3),
        batch=make_batch(0, num_openings=2),
    )
    done = train(policy, task, 4096, lambda _: None)
    assert done.metrics["loss/grad_norm"] > 0
    assert (policy.shares_prefixes, done.notes == []) == (family not in WITHOUT_TREES,) * 2
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in policy.parameters}
    assert layers == {path.rpartition(".")[2] for path in find_layers(meta_model(str(base))).takes}
    assert not layers & {"router", "gate", "experts", "shared_expert_gate", "lm_head"}
    assert all(parameter.grad is not None for parameter in policy.parameters.values())
