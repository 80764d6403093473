"""The policy on CUDA through Unsloth's kernels. Import only where CUDA is: importing Unsloth patches transformers.

Not tested: this project's tests have no GPU. Written from Unsloth's source of August 2026 (015bdef):
unsloth/models/loader.py `FastLanguageModel.from_pretrained`, unsloth/models/llama.py `get_peft_model`.
"""

import gc
import os
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel
from unsloth import FastLanguageModel  # pyright: ignore[reportMissingImports]  # extra `gpu`

from art.wire import LoRAConfig
from art_server.training.policy import Policy

MAX_SEQ_LENGTH = 32_768
"""Unsloth sizes its rotary tables by this and grows them when a longer row comes."""

LINEAR_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""What Unsloth has kernels for; it does not know PEFT's "all-linear"."""


class UnslothPolicy(Policy):
    name = "unsloth"
    can_share = False
    """Its layers call their own attention kernels, which know no trees."""

    def _load_base(self) -> PreTrainedModel:
        # Unsloth's heads may skip the logits otherwise; they look at each forward.
        os.environ["UNSLOTH_RETURN_LOGITS"] = "1"
        base, _ = FastLanguageModel.from_pretrained(
            model_name=self.base_model,
            max_seq_length=MAX_SEQ_LENGTH,
            dtype=self.dtype,
            load_in_4bit=False,
            use_exact_model_name=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
        return base

    def _wrap(self, lora: LoRAConfig, seed: int) -> PeftModel:
        model = FastLanguageModel.get_peft_model(
            self._base,
            r=lora.rank,
            lora_alpha=lora.alpha,
            target_modules=LINEAR_LAYERS if lora.target_modules is None else lora.target_modules,
            lora_dropout=0.0,
            bias="none",
            use_gradient_checkpointing="unsloth",
            random_state=seed,
        )
        # Its kernels are chosen by the training flag; no layer that it patches has dropout.
        return FastLanguageModel.for_training(model)

    def _drop_adapter(self) -> None:
        # Layers keep Unsloth's LoRA kernels after PEFT's unload, so a fresh base is the safe one. The old one goes
        # first: two do not fit.
        del self._base
        self._model, self._lora = None, None
        gc.collect()
        torch.cuda.empty_cache()
        self._base = self._load_base()

    def use_trees(self, shared: bool) -> None:
        assert not shared, "Unsloth's attention knows no trees"
        self.shares_prefixes = False

    def _forward(self, token_ids_BT: torch.Tensor, **arguments: Any) -> torch.Tensor:
        # Any: as in Policy.
        with torch.autocast("cuda", dtype=self.dtype):
            return super()._forward(token_ids_BT, **arguments)
