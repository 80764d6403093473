"""A base model with one LoRA adapter in fp32: log-probabilities, and the adapter to and from disk.

One base serves many models: each task loads its own adapter, so nothing of a task outlives it. Base weights never
change. Loading is from safetensors only and runs no code from a model's folder.
"""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from art.wire import LoRAConfig
from art_server.training.batches import MicroBatch

ADAPTER_FILE = "adapter_model.safetensors"


class Policy:
    """PEFT on whatever device torch finds; the trainer's default where Unsloth does not run."""

    name = "peft"

    def __init__(self, base_model: str, dtype: torch.dtype | None = None) -> None:
        """Load the base; `dtype` None is bfloat16 on CUDA and float32 elsewhere."""
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        self.base_model = base_model
        self._base = self._load_base()
        self.num_parameters = self._base.num_parameters()
        """Of the base, without adapter."""
        self._model: PeftModel | None = None
        self._lora: LoRAConfig | None = None

    @property
    def model(self) -> PeftModel:
        assert self._model is not None, "no adapter yet: init_adapter or load_adapter comes first"
        return self._model

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """What is trained, by name: the LoRA matrices, float32."""
        return {name: each for name, each in self.model.named_parameters() if each.requires_grad}

    def init_adapter(self, lora: LoRAConfig, seed: int) -> None:
        """A fresh adapter: A random by seed, B zero, so that the policy equals the base."""
        if self._model is not None:
            self._drop_adapter()
        self._model, self._lora = self._wrap(lora, seed), lora
        for name, parameter in self.parameters.items():
            assert parameter.dtype == torch.float32, f"{name} is {parameter.dtype}"

    def load_adapter(self, lora: LoRAConfig, folder: Path) -> None:
        """The adapter of a checkpoint.

        Raises FileNotFoundError without one, ValueError when its tensors are not those of `lora` on this base,
        RuntimeError when their shapes differ.
        """
        tensors = load_file(folder / ADAPTER_FILE)
        if self._lora != lora:
            self.init_adapter(lora, seed=0)
        expected = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        if different := sorted(expected.keys() ^ tensors.keys()):
            raise ValueError(
                f"{folder / ADAPTER_FILE} is not an adapter of {self.base_model} with {lora!r}: {different[:3]}"
            )
        set_peft_model_state_dict(self.model, tensors)

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter as PEFT names it into an existing folder."""
        tensors = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})
        config = self.model.peft_config["default"]
        config.inference_mode = True
        config.save_pretrained(str(folder))
        config.inference_mode = False

    def logprobs(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of each trained token, with gradient, and the entropy of its distribution, without.

        Both N, float32, temperature 1. Raises ValueError for a token that the vocabulary lacks.
        """
        logprobs_NV = torch.log_softmax(self._logits(batch), dim=-1)
        with torch.no_grad():
            entropies_N = torch.special.entr(logprobs_NV.exp()).sum(-1)
        return _gather(logprobs_NV, batch.targets_N), entropies_N

    @torch.no_grad()
    def reference_logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probability of each trained token under the base: the same weights, adapter off. N, float32."""
        with self.model.disable_adapter():
            return _gather(torch.log_softmax(self._logits(batch), dim=-1), batch.targets_N)

    def _logits(self, batch: MicroBatch) -> torch.Tensor:
        """Logits at the positions that predict a trained token, N x V, float32.

        The selection happens at the output head's door, so the model's own scaling and soft-capping of logits apply.
        """
        vocabulary = self.model.get_input_embeddings().num_embeddings
        largest = max(int(batch.token_ids_BT.max()), int(batch.targets_N.max()))
        if largest >= vocabulary:
            raise ValueError(
                f"token {largest} is outside the vocabulary of {self.base_model} ({vocabulary})"
            )

        def select(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            return (inputs[0][batch.rows_N, batch.positions_N][None],)

        hook = self.model.get_output_embeddings().register_forward_pre_hook(select)
        try:
            logits_1NV = self._forward(batch.token_ids_BT)
        finally:
            hook.remove()
        assert logits_1NV.shape[:2] == (1, len(batch.targets_N)), (
            "the model passed its output head by"
        )
        return logits_1NV[0].float()

    def _forward(self, token_ids_BT: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=token_ids_BT, use_cache=False).logits

    def _load_base(self) -> PreTrainedModel:
        base: Any = (
            AutoModelForCausalLM.from_pretrained(  # Any: the auto class hides the model's type
                self.base_model,
                dtype=self.dtype,
                attn_implementation="sdpa",
                use_safetensors=True,
                trust_remote_code=False,
            )
        )
        return base.to(
            self.device
        ).eval()  # eval: dropout would make the policy another one than was sampled

    def _wrap(self, lora: LoRAConfig, seed: int) -> PeftModel:
        config = PeftLoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]  # PEFT says int and divides it by r
            target_modules="all-linear" if lora.target_modules is None else lora.target_modules,
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )
        torch.manual_seed(seed)  # nothing else in the trainer draws random numbers
        model = get_peft_model(self._base, config)
        assert isinstance(model, PeftModel)
        return model.eval()

    def _drop_adapter(self) -> None:
        self._base, self._model, self._lora = self.model.unload(), None, None


def _gather(logprobs_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    return logprobs_NV.gather(-1, targets_N[:, None])[:, 0]
