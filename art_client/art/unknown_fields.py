"""Records that refuse unknown fields: the error names the field that was meant, also for names of other libraries.

A field that programs written for ART need is left out with one warning instead (`_left_out`).
"""

import difflib
import logging
from collections.abc import Mapping
from typing import Any, ClassVar, cast

from pydantic import BaseModel, model_validator

logger = logging.getLogger(__name__)

GROUPS = "the number of groups that `model.train` gets"
ROLLOUTS = "the number of rollouts in a TrajectoryGroup"
REQUEST = "an argument of the request that samples, such as `max_tokens`"
MEMORY = "nothing that is set: the server divides a step by its memory. `batch_size` is in groups"
LOOP = "the loop of the program: each `model.train` makes one step"
SERVER = "a flag of art-server"
LORA = "`art.TrainableModel(lora=art.LoRAConfig(...))`"

RATES = "`learning_rate`, a list with the rate of each optimizer step (create_lr_schedule of art.utils.sft makes one)"
MESSAGES = "`assistant_turns`: only assistant's messages are trained"


def by_name(names: Mapping[str, str]) -> dict[str, str]:
    """The key of each word: `{"x": "a b"} -> {"a": "x", "b": "x"}`."""
    return {name: ours for ours, words in names.items() for name in words.split()}


TRAINING_NAMES = by_name(
    {
        "`learning_rate`": "lr",
        "`max_grad_norm`": "grad_clip clip_grad",
        "fixed: AdamW without weight decay": "weight_decay optim optimizer adam_beta1 adam_beta2 adam_epsilon",
        "nothing that is set: adapters are trained without dropout": "lora_dropout",
        LORA: "r lora_r lora_alpha lora_rank lora_target "
        "lora_target_modules lora_target_linear adapter peft_config target_modules",
        SERVER: "max_seq_length sequence_len cutoff_len load_in_4bit load_in_8bit fast_inference use_vllm vllm_mode dtype bf16 fp16 "
        "vllm_gpu_memory_utilization flash_attention attn_implementation",
        "`art.evaluate(...)`, between train calls": "val_set_size eval_strategy evaluation_strategy eval_steps evals_per_epoch "
        "do_eval eval_dataset per_device_eval_batch_size eval_batch_size test_datasets",
        "`art.Backend(trackers=[...])`": "report_to use_wandb wandb_project wandb_entity",
        "the program's loop, which can end after any train call": "early_stopping_patience load_best_model_at_end",
        "nothing that is set: each train call makes a checkpoint": "save_steps save_strategy saves_per_epoch save_total_limit "
        "resume_from_checkpoint",
        "nothing that is set: the server packs sequences": "packing sample_packing pad_to_sequence_len",
    }
)
"""What names of TRL, Unsloth, axolotl and LLaMA-Factory are here, in both configurations of a train call."""

OTHER_NAMES: Mapping[str, str] = TRAINING_NAMES | by_name(
    {
        "`beta`": "kl_coef kl_loss_coef init_kl_coef use_kl_loss use_kl_in_reward",
        "`kl_estimator`": "kl_loss_type kl_penalty",
        "`epsilon`": "clip_ratio clip_ratio_low cliprange",
        "`epsilon_high`": "clip_ratio_high",
        "`dual_clip`, with clip='dual'": "clip_ratio_c delta",
        "`preset`": "adv_estimator loss_mode",
        "`preset`, or `normalisation` alone": "loss_type loss_agg_mode",
        "`scaling`": "scale_rewards norm_adv_by_std_in_grpo",
        "`ratio`": "importance_sampling_level",
        "`correction_high`": "vllm_importance_sampling_cap vllm_importance_sampling_clip_max tis_imp_ratio_cap",
        "`entropy_bonus`": "entropy_coef entropy_coeff",
        "`overlong='mask'`": "mask_truncated_completions",
        "`schedule`": "lr_scheduler lr_scheduler_type warmup_style",
        "`warmup_steps`": "warmup_ratio lr_warmup_steps lr_warmup_steps_ratio",
        "`passes`": "num_iterations ppo_epochs",
        "`batch_size`, in groups, or `mini_batches`": "ppo_mini_batch_size generation_batch_size",
        MEMORY: "per_device_train_batch_size gradient_accumulation_steps ppo_micro_batch_size gradient_checkpointing "
        "ppo_micro_batch_size_per_gpu use_gradient_checkpointing micro_batch_size",
        GROUPS: "train_batch_size",
        ROLLOUTS: "num_generations n rollout_n",
        REQUEST: "max_completion_length max_prompt_length response_length max_response_length max_tokens "
        "temperature top_p top_k min_p repetition_penalty generation_kwargs",
        LOOP: "num_train_epochs num_epochs total_epochs max_steps total_training_steps",
        "the rollout's own code, which sets `reward`": "reward_funcs reward_weights reward_function",
    }
)
"""What the names of TRL, Unsloth, verl and NVIDIA's toolkit are in `TrainConfig`. Sources: TRL's GRPOConfig, verl's ActorConfig and
algorithm section, the toolkit's `training` section."""

SFT_NAMES: Mapping[str, str] = TRAINING_NAMES | by_name(
    {
        RATES: "lr_scheduler lr_scheduler_type schedule schedule_steps warmup_steps warmup_ratio cosine_min_lr_ratio",
        "`batch_size`: the server divides an optimizer step by its memory": "micro_batch_size per_device_train_batch_size "
        "gradient_accumulation_steps train_batch_size mini_batches",
        "nothing that is set: the server divides a step by its memory": "gradient_checkpointing use_gradient_checkpointing",
        "`epochs`": "num_epochs num_train_epochs passes total_epochs",
        MESSAGES: "train_on_inputs train_on_prompt assistant_only_loss completion_only_loss roles_to_train",
    }
)
"""What the names of TRL's SFTConfig, axolotl and LLaMA-Factory are in `TrainSFTConfig`."""

LORA_NAMES: Mapping[str, str] = by_name(
    {
        "`rank`": "lora_r lora_rank",
        "`target_modules`": "lora_target lora_target_modules",
        "`target_modules=None`, the default": "lora_target_linear",
    }
)
"""What the names of axolotl, LLaMA-Factory and verl are in `LoRAConfig`."""

ART_TRAINING_FIELDS = frozenset(
    {
        *("final_training_step", "grad_accumulation_sequences", "kl_penalty_coef", "kl_penalty_source"),
        "optimizer_save_interval",
    }
)
"""Fields of ART's train configuration without an effect here."""
PEFT_FIELDS = frozenset(
    {
        *("bias", "dropout", "init_lora_weights", "init_weights", "layers_pattern", "layers_to_transform"),
        *("loftq_config", "lora_dropout", "max_seq_length", "modules_to_save", "random_state"),
        *("temporary_location", "use_gradient_checkpointing", "use_rslora"),
    }
)
"""Fields of PEFT's and ART's LoRA configurations without an effect here."""

_warned: set[tuple[str, str]] = set()
"""Record and field of the warnings that were logged."""


class Strict(BaseModel):
    """A record that refuses unknown fields by name."""

    _renamed: ClassVar[Mapping[str, str]] = {}
    """Other names of the record's own fields."""
    _other_names: ClassVar[Mapping[str, str]] = {}
    """What the names of other libraries are here."""
    _left_out: ClassVar[frozenset[str] | None] = frozenset()
    """Unknown fields that are left out with one warning each; None: all but those that resemble a field."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:  # Any: the input is not validated yet
        if not isinstance(data, dict):
            return data
        fields = cast("dict[str, Any]", data)
        # `art.finetune` has a subclass that keeps the fields of NVIDIA's toolkit.
        if fields.keys() <= cls.model_fields.keys() or cls.model_config.get("extra") == "allow":
            return fields
        return cls._accepted(fields)

    @classmethod
    def _accepted(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields under our names, without those that are left out.

        Raises:
            ValueError: unknown fields; the message names the fields that were meant.
        """
        fields = {cls._renamed.get(name, name): value for name, value in fields.items()}
        refused: list[str] = []
        for name in [name for name in fields if name not in cls.model_fields]:
            hint = cls._hint(name)
            if name in (cls._left_out or ()) or (cls._left_out is None and hint is None):
                del fields[name]
                _warn_once(cls, name)
            else:
                refused.append(f"{cls.__name__} has no field '{name}'" + (f": {hint}" if hint else ""))
        if refused:
            raise ValueError("; ".join(refused))
        return fields

    @classmethod
    def _hint(cls, name: str) -> str | None:
        """The field that was meant."""
        if name in cls._other_names:
            return f"here it is {cls._other_names[name]}"
        near = difflib.get_close_matches(name, [*cls.model_fields, *cls._renamed, *(cls._left_out or ())], n=1)
        return f"did you mean '{near[0]}'?" if near else None


def _warn_once(kind: type[BaseModel], name: str) -> None:
    if (kind.__qualname__, name) not in _warned:
        _warned.add((kind.__qualname__, name))
        logger.warning("%s has no field %r: its value is left out", kind.__name__, name)
