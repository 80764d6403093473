"""The policy: a base model with one LoRA adapter in float32. Computes log-probabilities, loads and saves the adapter.

One base serves many models: each task loads its own adapter, so it does not depend on earlier tasks. Base weights never
change. Weights are loaded from safetensors only, and no code from a model's folder runs.
"""

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from art_protocol.wire import LoRAConfig
from art_server.trainer.attention import (
    TREE_ATTENTION,
    ForestAttention,
    flex_padding,
)
from art_server.trainer.base import adapter_tensors, load_base, peft_config, usual_attention
from art_server.trainer.batches import MicroBatch
from art_server.trainer.distributions import RAW, cut_pieces
from art_server.trainer.facts import AttentionKind, default_kind, usual_device, usual_dtype
from art_server.trainer.gang_view import ALONE, GangView
from art_server.trainer.head import Scores, max_logits, score_targets, whole_pieces
from art_server.trainer.host_copy import HostCopy
from art_server.trainer.lora import fuse_lora
from art_server.trainer.memory import CHECKPOINTING_FACTOR, default_tokens, fill_tokens, free_cached_memory
from art_server.trainer.rope import fix_rope
from art_server.trainer.states import share_states
from art_server.trainer.teacher import is_taught
from art_server.trainer.tree import Forest, pad_forest

ADAPTER_FILE = "adapter_model.safetensors"
FACTORS_OF_LOGITS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""Fields of configurations by whose values families multiply their logits: Cohere, Falcon-H1, Muse Glimmer."""


class Policy:
    """The policy with PEFT's LoRA layers, on any torch device."""

    name = "peft"
    can_share = True
    """Whether the model's code can take trees at all; `check_trees` then decides."""

    def __init__(
        self,
        base_model: str,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        gang: GangView = ALONE,
    ) -> None:
        """Loads the base. Defaults: bfloat16 on CUDA and float32 elsewhere; the first GPU, or the CPU where there is none; no
        other ranks. The ranks of a sharded gang load their policies at the same time."""
        self.device = usual_device() if device is None else device
        self.dtype = dtype or usual_dtype(self.device)
        self.base_model = base_model
        self.gang = gang
        self._base = self._load_base()
        self._states = share_states(self._base)
        self.use_context(None)
        self.num_parameters = self._base.num_parameters()
        """Parameters of the base, without the adapter."""
        self._model: PeftModel | None = None
        self._lora: LoRAConfig | None = None
        self.has_tried_trees = False
        """Whether `try_trees` has computed a gradient over trees."""
        self.tree_gap: float | None = None
        """The difference that `check_trees` measured; None before it ran."""
        self.sequence_gap: float | None = None
        """The difference that `check_sequences` measured; None before it ran."""
        self.checkpointing_factor: float = CHECKPOINTING_FACTOR
        """How many times more tokens fit with gradient checkpointing."""
        self.fill_tokens = fill_tokens(self.device)
        """Small trees are packed together up to this many tokens; None is as many as fit."""
        self._away: HostCopy | None = None
        self._is_away = False
        self.use_trees(self.can_share)

    @property
    def model_type(self) -> str:
        return str(self._base.config.model_type)

    @property
    def hidden_size(self) -> int:
        return int(self._base.config.get_text_config().hidden_size)

    @property
    def default_tokens(self) -> int:
        """Tokens per micro-batch that fit the device without gradient checkpointing."""
        config: Any = self._base.config.get_text_config()  # Any: the fields that language models share
        intermediate = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        return default_tokens(self.device, self.dtype, config.num_hidden_layers, config.hidden_size, intermediate)

    @property
    def facts(self) -> dict[str, str]:
        """How the policy computes, by name: what must be equal on all ranks of a gang."""
        return {
            "number type": str(self.dtype).removeprefix("torch."),
            "attention": self.attention_kind,
            "attention of separate sequences": usual_attention(type(self._base), self._base.config),
        }

    @property
    def model(self) -> PeftModel:
        assert self._model is not None, "no adapter yet: init_adapter or load_adapter comes first"
        return self._model

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The trained parameters by name: the LoRA matrices, float32."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def init_adapter(self, lora: LoRAConfig, seed: int) -> None:
        """Starts with a fresh adapter: A is random by seed, B is zero, so the policy equals the base."""
        if self._model is not None:
            self._drop_adapter()
        self._model, self._lora = self._wrap(lora, seed), lora
        for name, parameter in self.parameters.items():
            assert parameter.dtype == torch.float32, f"{name} is {parameter.dtype}"

    def load_adapter(self, lora: LoRAConfig, folder: Path) -> None:
        """Loads the adapter of a checkpoint.

        Raises:
            FileNotFoundError: the folder has no adapter.
            ValueError: the folder's tensors are not the tensors of `lora` on this base.
            RuntimeError: the tensors have other shapes.
        """
        tensors = load_file(folder / ADAPTER_FILE)
        if self._lora != lora:
            self.init_adapter(lora, seed=0)
        expected = adapter_tensors(self.model)
        # PEFT loads with strict=False: a layer without tensors would keep the weights of the adapter before.
        if different := sorted(expected.keys() ^ tensors.keys()):
            raise ValueError(
                f"{folder / ADAPTER_FILE} is not an adapter of {self.base_model} with {lora!r}: {different[:3]}"
            )
        set_peft_model_state_dict(self.model, tensors)

    def save_adapter(self, folder: Path) -> None:
        """Writes the adapter into an existing folder, in PEFT's format."""
        _save(self.model, adapter_tensors(self.model), folder)

    def drop_gradients(self) -> None:
        """Frees the gradients' memory, which the engine needs between steps."""
        if self._model is not None:
            self._model.zero_grad()

    def leave_device(self, optimizer: torch.optim.Optimizer, *, keep_copy: bool) -> None:
        """Frees the device's memory, except the process's context. Adapter and optimizer state move to main memory.
        With `keep_copy` the base moves too, and `return_to_device` undoes the move; else the policy can only be saved."""
        frozen = [parameter for parameter in self.model.parameters() if not parameter.requires_grad]
        if not keep_copy:
            for parameter in frozen:
                parameter.data = torch.empty(0)
            holders: list[Any] = [*frozen, *self.model.modules()]
            for holder in holders:
                if hasattr(holder, "quant_state"):  # the scales of bitsandbytes' 4-bit weights
                    holder.quant_state = None
                quantised: Any = getattr(holder, "state", None)  # of bitsandbytes' 8-bit layers
                if hasattr(quantised, "CB"):
                    quantised.CB = None
        else:
            if self._away is None or not self._away.holds(frozen):
                self._away = HostCopy(frozen, self.device)
            self._away.leave()
        for parameter in self.parameters.values():
            parameter.grad, parameter.data = None, parameter.data.cpu()
        for state in optimizer.state.values():
            state.update({key: value.cpu() for key, value in state.items()})
        self._is_away = True
        free_cached_memory()

    def return_to_device(self) -> None:
        """Undoes `leave_device`, if the policy has left."""
        if not self._is_away:
            return
        assert self._away is not None
        self._away.return_to_device()
        for parameter in self.parameters.values():
            parameter.data = parameter.data.to(self.device)
        self._is_away = False

    def use_trees(self, shared: bool) -> None:
        """Switches between trees (True) and unshared sequences with the model's usual attention (False).

        `check_trees` finds out whether trees work. Both give the same update.
        """
        self.shares_prefixes = shared
        self._states.use(None)
        self._base.set_attn_implementation(
            TREE_ATTENTION if shared else usual_attention(type(self._base), self._base.config)
        )

    def use_context(self, max_seq_length: int | None) -> None:
        """Computes positions as an engine with this context does (`rope.py`); None is the model's number of positions."""
        fix_rope(self._base, max_seq_length)

    def use_checkpointing(self, enabled: bool) -> None:
        """Keeps only each layer's input for backward and recomputes the rest: less memory, a third more time."""
        model: Any = self._base  # Any: transformers' switches are untyped
        if enabled:
            # torch's reentrant kind needs an input with a gradient, and frozen embeddings give none.
            model.gradient_checkpointing_enable({"use_reentrant": False})
        elif model.is_gradient_checkpointing:
            model.gradient_checkpointing_disable()
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                # These layers read this flag. `load_base` has switched dropout off.
                module.training = enabled

    @property
    def uses_checkpointing(self) -> bool:
        """Whether gradient checkpointing is on."""
        return bool(self._base.is_gradient_checkpointing)

    def logprobs(self, batch: MicroBatch, *, with_entropy_gradient: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of each prediction, and entropy of its distribution: both N, float32; see `scores`."""
        return self.scores(batch, with_entropy_gradient=with_entropy_gradient)[:2]

    def scores(self, batch: MicroBatch, *, with_entropy_gradient: bool = False) -> Scores:
        """The scores of each prediction.

        Each prediction is scored under the distribution that its token was sampled from. Log-probabilities have a gradient,
        entropies only on request.

        Raises:
            ValueError: a token is outside the vocabulary, or outside its kept set.
        """
        self._check_tokens(batch)
        hidden_ND, targets_N = self._hidden(batch), batch.targets_N.to(self.device)
        num, more_NK = self._num_vocabulary, None
        if bool(is_taught(batch.taught_N).any()):
            # A prediction without a target gets the tokens of any other, and its divergence is not read.
            more_NK = batch.taught.ids_UK[batch.taught_N.clamp(min=0)].to(self.device)
        pieces, order_N = whole_pieces(targets_N, self._project, num, more_NK), None
        if bool((batch.distributions_N != RAW).any()):
            order_N = batch.distributions_N.argsort(stable=True)
            sorted_N, order_N = batch.distributions_N[order_N].numpy(), order_N.to(self.device)
            hidden_ND, targets_N = hidden_ND[order_N], targets_N[order_N]
            limit = max_logits(self.device)
            more_NK = None if more_NK is None else more_NK[order_N]
            pieces = cut_pieces(sorted_N, targets_N, batch.table, self._project, self._project, num, limit, more_NK)
        scores = score_targets(hidden_ND, pieces, with_entropy_gradient=with_entropy_gradient)
        if order_N is None:
            return scores
        back_N = order_N.argsort()
        return Scores(*(values_N[back_N] for values_N in scores))

    @torch.no_grad()
    def reference_logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probability of each prediction under the base model, with the adapter off: N, float32."""
        with self.model.disable_adapter():
            return self.logprobs(batch)[0]

    @torch.no_grad()
    def sequence_logprobs(self, token_ids: list[int], positions: list[int] | None = None) -> torch.Tensor:
        """Log-probability of the token after each position of one sequence, float32: by the model's usual attention and
        its own logits. The default is all positions but the last."""
        positions_N = torch.tensor(range(len(token_ids) - 1) if positions is None else positions, device=self.device)
        token_ids_1T = torch.tensor([token_ids], device=self.device)
        shared = self.shares_prefixes
        self.use_trees(False)

        def select(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            return (inputs[0][:, positions_N],)

        model = self._plain_model()
        hook = model.get_output_embeddings().register_forward_pre_hook(select)
        try:
            logits_NV = model(input_ids=token_ids_1T, use_cache=False).logits[0].float()
        finally:
            hook.remove()
            self.use_trees(shared)
        return logits_NV.log_softmax(-1).gather(-1, token_ids_1T[0, positions_N + 1, None])[:, 0]

    def _check_tokens(self, batch: MicroBatch) -> None:
        vocabulary = self.model.get_input_embeddings().num_embeddings
        largest = max(int(batch.forest.token_ids_T.max()), int(batch.targets_N.max()))
        if len(batch.taught.ids_UK):
            largest = max(largest, int(batch.taught.ids_UK.max()))
        # On a GPU an index out of range is an error after which no call on the device succeeds.
        if largest >= vocabulary:
            raise ValueError(f"token {largest} is outside the vocabulary of {self.base_model} ({vocabulary})")

    def _hidden(self, batch: MicroBatch) -> torch.Tensor:
        """The output head's input at each predicting position, N x D.

        A hook on the head takes this input, so that it includes everything that the model computes before its head.
        """
        arguments, indices_N = self._arguments(batch)
        taken: list[torch.Tensor] = []

        def take(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            taken.append(inputs[0].flatten(0, 1)[indices_N.to(self.device)])
            # The head computes no logits here: `_project` does, in pieces.
            return (inputs[0][:, :0],)

        hook = self.model.get_output_embeddings().register_forward_pre_hook(take)
        try:
            self._forward(**arguments)
        finally:
            hook.remove()
        assert len(taken) == 1, "the model must call its output head exactly once"
        return taken[0]

    def _arguments(self, batch: MicroBatch) -> tuple[dict[str, Any], torch.Tensor]:
        """The model's arguments for a micro-batch, and the N predicting positions as indices into its flattened input.

        Any: tensors, and the forest for our attention.
        """
        if batch.is_shared:
            return self._tree_arguments(batch.forest), batch.forest_indices_N
        self._states.use(None)
        rows_BT = _pad_rows(batch.forest).to(self.device)
        return {"token_ids_BT": rows_BT}, _padded_indices(batch.forest, batch.forest_indices_N)

    @property
    def attention_kind(self) -> AttentionKind:
        return default_kind(self.device)

    def _tree_arguments(self, forest: Forest) -> dict[str, Any]:
        kind = self.attention_kind
        padding = flex_padding(forest.num_tokens) if kind == "flex" else 0
        if padding:
            forest = pad_forest(forest, padding)
        self._states.use(forest)
        return {
            "token_ids_BT": forest.token_ids_T[None].to(self.device),
            "position_ids": forest.positions_T[None].to(self.device),
            "forest": ForestAttention.of(forest, kind, self.device),
        }

    def _project(self, hidden_ND: torch.Tensor, columns_C: torch.Tensor | None = None) -> torch.Tensor:
        """The model's logits from the input of its output head, for the whole vocabulary or only for the tokens `columns_C`.

        Source: transformers 5.19, the `forward` of Gemma2ForCausalLM (soft cap), GraniteForCausalLM (division),
        CohereForCausalLM, FalconH1ForCausalLM, MuseGlimmerForCausalLM, HyperCLOVAXForCausalLM (product). `check_trees`
        and `check_sequences` compare with the model's own logits, so they detect other formulas.
        """
        config = self._base.config.get_text_config()
        head = self.model.get_output_embeddings()
        if columns_C is None:
            logits_NV = head(hidden_ND)
        elif type(head) is torch.nn.Linear:
            bias = None if head.bias is None else head.bias[columns_C]
            logits_NV = torch.nn.functional.linear(hidden_ND, head.weight[columns_C], bias)
        else:  # a head with an adapter
            logits_NV = head(hidden_ND)[:, columns_C]
        scaling = getattr(config, "logits_scaling", None)
        if scaling is not None and self.model_type != "minicpm3":  # MiniCPM3 divides the head's input
            multiplies = self.model_type.startswith("hyperclovax")
            logits_NV = logits_NV * scaling if multiplies else logits_NV / scaling
        for name in FACTORS_OF_LOGITS:
            if (factor := getattr(config, name, None)) is not None:
                logits_NV = logits_NV * factor
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            logits_NV = torch.tanh(logits_NV / cap) * cap
        return logits_NV

    @property
    def _num_vocabulary(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])

    def _forward(self, token_ids_BT: torch.Tensor, **arguments: Any) -> torch.Tensor:
        # Any: position_ids and the forest, which transformers passes to its attention function.
        return self.model(input_ids=token_ids_BT, use_cache=False, **arguments).logits

    def _plain_model(self) -> Any:
        """The model with its adapter, as transformers computes it. Any: its forward is untyped."""
        return self.model

    def _load_base(self) -> PreTrainedModel:
        if not self.gang.is_sharded:
            return load_base(self.base_model, self.dtype, self.device)
        # Imported here, because FSDP takes time that one rank need not spend.
        from art_server.trainer.sharding import shard_base

        return shard_base(load_base(self.base_model, self.dtype, torch.device("cpu")), self.gang, self.device)

    def _wrap(self, lora: LoRAConfig, seed: int) -> PeftModel:
        torch.manual_seed(seed)  # nothing else in the trainer draws random numbers
        model = get_peft_model(self._base, peft_config(lora, self._base))
        assert isinstance(model, PeftModel)
        fuse_lora(model)
        return model.eval()

    def _drop_adapter(self) -> None:
        self._base, self._model, self._lora = self.model.unload(), None, None


def _save(model: PeftModel, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})
    config = model.peft_config["default"]
    # As PEFT's own `save_pretrained` writes it.
    config.inference_mode = True
    config.save_pretrained(str(folder))
    config.inference_mode = False


def _pad_rows(forest: Forest) -> torch.Tensor:
    """The unshared sequences of a forest, one row each, padded on the right, where causal attention does not reach."""
    rows = [forest.token_ids_T[node.start : node.stop] for node in forest.nodes]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _padded_indices(forest: Forest, forest_indices_N: torch.Tensor) -> torch.Tensor:
    """Indices in the forest as indices into the flattened rows of `_pad_rows`."""
    starts = torch.tensor([node.start for node in forest.nodes])
    longest = max(node.stop - node.start for node in forest.nodes)
    rows_N = torch.searchsorted(starts, forest_indices_N, right=True) - 1
    return rows_N * longest + forest.positions_T[forest_indices_N]
