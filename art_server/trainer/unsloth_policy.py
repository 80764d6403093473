"""The policy with Unsloth's kernels, on request. Importing Unsloth patches transformers and peft, so it is imported
before them (`unsloth_worker.py`), and only the worker imports this file, on demand.

Unsloth does loading, kernels and gradient checkpointing; `Policy` does adapter, head and loss. Written against unsloth
2026.10.7; only this file uses its private names. docs/training.md lists the differences from PEFT.
"""

import contextlib
import importlib.util
import sys
from typing import Any

import torch
from accelerate import init_empty_weights
from peft import PeftModel, get_peft_model
from transformers import PreTrainedModel
from unsloth import FastLanguageModel, FastModel  # pyright: ignore[reportMissingImports]  # extra `gpu`
from unsloth.utils import attention_dispatch  # pyright: ignore[reportMissingImports]
from unsloth_zoo.gradient_checkpointing import (  # pyright: ignore[reportMissingImports]
    reset_unsloth_gradient_checkpointing_buffers,
)
from unsloth_zoo.peft_utils import (  # pyright: ignore[reportMissingImports]
    requires_grad_for_gradient_checkpointing,
)

from art_protocol.wire import LoRAConfig
from art_server.trainer.attention import ForestAttention, tree_attention
from art_server.trainer.base import (
    find_class,
    match_engine,
    peft_config,
    read_config,
    usual_attention,
)
from art_server.trainer.batches import MicroBatch
from art_server.trainer.policy import Policy
from art_server.trainer.tree import pad_forest


class UnslothPolicy(Policy):
    name = "unsloth"

    def __init__(
        self,
        base_model: str,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        max_seq_length: int | None = None,
    ) -> None:
        """Loads the base for sequences of `max_seq_length` tokens, at most the model's number of positions: above
        this number Unsloth would stretch the model's RoPE and train another model than the engine serves."""
        own = int(read_config(base_model).get_text_config().max_position_embeddings)
        self.max_length = min(own, max_seq_length or own)
        super().__init__(base_model, dtype, device)

    def use_trees(self, shared: bool) -> None:
        self.shares_prefixes = shared

    def use_checkpointing(self, enabled: bool) -> None:
        """Does nothing: Unsloth's checkpointing is always on, and keeps its inputs in main memory."""

    def leave_device(self, optimizer: torch.optim.Optimizer, *, keep_copy: bool) -> None:
        with contextlib.suppress(NameError):  # sequences shorter than 512 have no buffers
            reset_unsloth_gradient_checkpointing_buffers()
        super().leave_device(optimizer, keep_copy=keep_copy)

    def _load_base(self) -> PreTrainedModel:
        config = read_config(self.base_model)
        quantised = getattr(config, "quantization_config", None) or {}
        base, _ = FastLanguageModel.from_pretrained(
            model_name=self.base_model,
            max_seq_length=self.max_length,
            dtype=self.dtype,
            load_in_4bit=bool(quantised.get("load_in_4bit")),
            device_map={"": self.device},
            use_exact_model_name=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
        # Families for which Unsloth has no layers run on transformers' layers, compiled.
        self._has_own_layers = type(base).forward.__module__.startswith("unsloth.models.")
        text = config.get_text_config()
        limits = ("sliding_window", "attn_logit_softcapping")
        self.can_share = self._has_own_layers and not any(getattr(text, limit, None) for limit in limits)
        attention_dispatch._flex_shared_prefix_attention = _attend
        match_engine(base)
        return base

    def _wrap(self, lora: LoRAConfig, seed: int) -> PeftModel:
        torch.manual_seed(seed)
        model = get_peft_model(self._base, peft_config(lora, self._base))
        if self._has_own_layers:
            model = FastLanguageModel.patch_peft_model(model, use_gradient_checkpointing="unsloth")
        else:
            requires_grad_for_gradient_checkpointing(model)
            model = FastModel.post_patch_model(model, use_gradient_checkpointing="unsloth")
        # Unsloth chooses kernels by the training flag. No layer that it patches has dropout.
        return FastLanguageModel.for_training(model)

    def _drop_adapter(self) -> None:
        super()._drop_adapter()
        # Layers would keep the kernels that were chosen for the old adapter.
        for name, module in self._base.named_modules():
            kernels = ["apply_qkv", "apply_o"]
            if name.endswith(".mlp"):
                kernels.append("forward")
            for kernel in kernels:
                vars(module).pop(kernel, None)

    def _check_tokens(self, batch: MicroBatch) -> None:
        longest = int(batch.forest.positions_T.max()) + 1
        if longest > self.max_length:
            raise ValueError(
                f"a sequence of {longest} tokens is longer than the {self.max_length} that Unsloth was loaded for: "
                f"{self.base_model} has no more positions, or --max-seq-length allows no more; send shorter "
                "trajectories, or use --trainer peft"
            )
        super()._check_tokens(batch)

    def _arguments(self, batch: MicroBatch) -> tuple[dict[str, Any], torch.Tensor]:
        """Trees, or sequences packed one after the other; sequences are padded if the layers are not Unsloth's."""
        if not self._has_own_layers:
            return super()._arguments(batch)
        # With a single token Unsloth does not call the output head's module.
        forest = batch.forest if batch.forest.num_tokens > 1 else pad_forest(batch.forest, 1)
        if batch.is_shared:
            arguments = self._tree_arguments(forest)
            arguments["prefix_seg_info"] = arguments.pop("forest")
            return arguments, batch.forest_indices_N
        lengths = torch.tensor([node.stop - node.start for node in forest.nodes], dtype=torch.int32)
        arguments = {
            "token_ids_BT": forest.token_ids_T[None].to(self.device),
            "position_ids": forest.positions_T[None].to(self.device),
            "packed_seq_lengths": lengths.to(self.device),
        }
        return arguments, batch.forest_indices_N

    def _forward(self, token_ids_BT: torch.Tensor, **arguments: Any) -> torch.Tensor:
        # Any: as in Policy.
        is_mixed = self.dtype != torch.float32
        with torch.autocast(self.device.type, self.dtype if is_mixed else None, is_mixed):
            return super()._forward(token_ids_BT, **arguments)

    def _plain_model(self) -> Any:
        """transformers' own model with the same weights, embeddings and (adapted) linear layers."""
        config = read_config(self.base_model)
        model_class = _untouched_class(config)
        with init_empty_weights():
            plain = model_class._from_config(
                config, dtype=self.dtype, attn_implementation=usual_attention(model_class, config)
            )
        _share_weights(plain, self._base)
        match_engine(plain)
        return plain.to(self.device).eval()


def _attend(
    query_BTHD: torch.Tensor,
    key_BTHD: torch.Tensor,
    value_BTHD: torch.Tensor,
    forest: ForestAttention,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention over trees, instead of Unsloth's kernel for a prompt that a group shares. Unsloth's decoders pass
    `prefix_seg_info` to this function unchanged (unsloth/utils/attention_dispatch.py, `_run_attention`)."""
    query, key, value = (states.transpose(1, 2) for states in (query_BTHD, key_BTHD, value_BTHD))
    return tree_attention(_LAYER, query, key, value, None, scaling=scale, forest=forest)[0]


_LAYER = torch.nn.Module()
"""The layer that `tree_attention` names in its messages."""


def _untouched_class(config: Any) -> Any:
    """The family's class without Unsloth's changes to the imported class: the class's file is executed once more.

    Any: as in `find_class`.
    """
    imported = importlib.util.find_spec(type(config).__module__.replace(".configuration_", ".modeling_"))
    assert imported is not None and imported.origin is not None
    spec = importlib.util.spec_from_file_location(f"{imported.name}_untouched", imported.origin)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, find_class(config).__name__)


def _share_weights(plain: torch.nn.Module, own: torch.nn.Module) -> None:
    """Gives the model `plain` the weights of `own`. Linear layers are shared whole, because they may be adapted or
    quantised. Of other layers only the weights are shared, because Unsloth may compute them differently."""
    for name, child in list(plain.named_children()):
        theirs = getattr(own, name)
        if isinstance(child, torch.nn.Linear) or child._parameters.keys() != theirs._parameters.keys():
            setattr(plain, name, theirs)
        else:
            child._parameters.update(theirs._parameters)
            _share_weights(child, theirs)
