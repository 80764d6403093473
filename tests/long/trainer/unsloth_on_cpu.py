"""What test_unsloth.py runs in .venv-unsloth: UnslothPolicy on a CPU, under Unsloth's own test switch and Triton's
interpreter. It writes what it computed beside each base model, for the test to compare.

    UNSLOTH_ALLOW_CPU=1 TRITON_INTERPRET=1 python unsloth_on_cpu.py FOLDER...

Unsloth asks CUDA for a few things that a CPU has no answer to; they are answered here.
"""

import json
import socket
import sys
import types
from pathlib import Path
from typing import Any, NoReturn

import torch


def no_network(*arguments: Any) -> NoReturn:
    raise AssertionError(f"a connection: {arguments}")


class OneDevice(list):
    """Unsloth's caches, one entry a GPU: here the CPU is the only one."""

    def __getitem__(self, _: Any) -> Any:
        return super().__getitem__(0)

    def __setitem__(self, _: Any, value: Any) -> None:
        super().__setitem__(0, value)


class NumDevices:
    """`[x] * this` makes such a cache."""

    def __rmul__(self, values: list) -> OneDevice:
        return OneDevice(values)


socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = no_network  # type: ignore[assignment]
torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(
    name="none", total_memory=2**33, major=8, minor=0, multi_processor_count=1
)
torch.cuda.current_device = lambda: 0
import unsloth  # noqa: E402, F401
from unsloth.models import llama  # noqa: E402

llama.DEVICE_COUNT, llama.DEVICE_TYPE_TORCH = NumDevices(), "cpu"
llama.get_current_device = lambda: "cpu"

from safetensors.torch import save_file  # noqa: E402
from transformers.modeling_layers import GradientCheckpointingLayer  # noqa: E402

from art_protocol.wire import LoRAConfig, TrainConfig  # noqa: E402
from art_server.shared.trainer_messages import Batch, TrainTask  # noqa: E402
from art_server.trainer.batches import (  # noqa: E402
    MicroBatch,
    make_micro_batches,
    make_train_batch,
)
from art_server.trainer.job import train  # noqa: E402
from art_server.trainer.unsloth_policy import UnslothPolicy  # noqa: E402
from tests.makers.first_steps import write_first_checkpoint  # noqa: E402

SERVERS_LENGTH = 32_768
CPU = torch.device("cpu")
ATTENTION = LoRAConfig(rank=2, target_modules=["q_proj", "v_proj"])


class Stretched(UnslothPolicy):
    """What Unsloth makes of a model when it is asked for more than the model's own length; from 512 on it would offload
    checkpoints, which takes a GPU."""

    def _load_base(self) -> Any:
        self.max_length = 500
        return super()._load_base()


def one_micro_batch(batch: Batch, *, shared: bool = True) -> MicroBatch:
    (micro_batch,) = make_micro_batches(make_train_batch(batch).sequences, 100_000, shared=shared)
    return micro_batch


def weights_of(num: int) -> torch.Tensor:
    """What each log-probability counts in the sum whose gradient is compared."""
    return torch.randn(num, generator=torch.Generator().manual_seed(5))


def compute(policy: UnslothPolicy, batch: MicroBatch) -> dict[str, torch.Tensor]:
    logprobs_N, _ = policy.logprobs(batch)
    policy.model.zero_grad(set_to_none=True)
    (logprobs_N * weights_of(len(logprobs_N))).sum().backward()
    gradients = {f"gradient {name}": parameter.grad for name, parameter in policy.parameters.items()}
    return {"logprobs": logprobs_N.detach(), **gradients}  # type: ignore[dict-item]


def refusal(compute: Any, *arguments: Any) -> str:
    try:
        compute(*arguments)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def check(folder: Path) -> None:
    base, adapter = str(folder / "base"), folder / "adapter"
    batches = {file.stem: Batch.model_validate_json(file.read_text()) for file in folder.glob("*.json")}
    batch = batches["batch"]
    told: dict[str, Any] = {}
    policy = UnslothPolicy(base, torch.float32, CPU, SERVERS_LENGTH)
    policy.load_adapter(LoRAConfig(), adapter)
    told["max_length"] = policy.max_length
    told["rope"] = policy._base.config.rope_parameters
    told["can_share"] = policy.can_share
    for name, shared in (("trees", True), ("sequences", False)):
        save_file(compute(policy, one_micro_batch(batch, shared=shared)), folder / f"{name}.safetensors")
    trees = one_micro_batch(batch)
    other = {
        "reference": policy.reference_logprobs(trees),
        "plain sequence": policy.sequence_logprobs(batches["one_row"].groups[0].trajectories[0].sequences[0].token_ids),
        "one token": policy.logprobs(one_micro_batch(batches["one_token"]))[0].detach(),
    }

    task = TrainTask(
        lora=LoRAConfig(),
        in_dir=str(adapter),
        out_dir=str(folder / "trained"),
        config=TrainConfig(learning_rate=1e-3),
        batch=batch,
    )
    told["metrics"] = train(policy, task, 100_000, lambda _: None, between_steps="leave").metrics
    policy.return_to_device()
    layers = [layer for layer in policy.model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    told["checkpointing"] = [layer.gradient_checkpointing and layer.training for layer in layers]
    told["too long"] = refusal(policy.logprobs, one_micro_batch(batches["too_long"]))

    write_first_checkpoint(base, ATTENTION, 3, folder / "attention")
    policy.load_adapter(ATTENTION, folder / "attention")
    other["fresh"] = policy.logprobs(trees)[0].detach()
    save_file(other, folder / "other.safetensors")

    stretched = Stretched(base, torch.float32, CPU)
    told["stretched"] = refusal(train, stretched, task, 100_000, lambda _: None)
    (folder / "told.txt").write_text(json.dumps(told))


def check_half(folder: Path) -> None:
    """In 16 bits Unsloth fuses the adapter into its kernels. (The interpreter cannot compute in bfloat16.)"""
    batch = one_micro_batch(Batch.model_validate_json((folder / "batch.json").read_text()))
    policy = UnslothPolicy(str(folder / "base"), torch.float16, CPU)
    policy.load_adapter(LoRAConfig(), folder / "adapter")
    assert num_fused(policy) == 6, "two layers: q k v, o and the MLP"
    half = compute(policy, batch)
    # An adapter of another shape takes the place of the first, on the same base.
    loaded = policy._base
    policy.load_adapter(ATTENTION, folder / "attention")
    assert num_fused(policy) == 0 and policy._base is loaded
    policy.load_adapter(LoRAConfig(), folder / "adapter")
    again = {"again": policy.logprobs(batch)[0].detach()}
    save_file(half | again, folder / "half.safetensors")


def num_fused(policy: UnslothPolicy) -> int:
    names = ("apply_lora_qkv", "apply_lora_o", "apply_lora_mlp_swiglu")
    own = [attribute for module in policy._base.modules() for attribute in vars(module).values()]
    return sum(getattr(attribute, "__name__", None) in names for attribute in own)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        check(Path(argument))
    check_half(Path(sys.argv[-1]))
