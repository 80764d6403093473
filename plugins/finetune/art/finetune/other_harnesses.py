"""Where a finetuning file has what the files of axolotl, LLaMA-Factory, TRL and verl call otherwise; and files of theirs.

docs/finetune.md has the same as a table. `art.unknown_fields` has the names in `TrainConfig` and `TrainSFTConfig`.
"""

from collections.abc import Mapping
from typing import Any

from art.unknown_fields import OTHER_NAMES, by_name

ADAPTER = "trainer_adapters.NAME"

FILE_NAMES: Mapping[str, str] = by_name(
    {
        f"{ADAPTER}.backend.lora.rank": "r lora_r lora_rank",
        f"{ADAPTER}.backend.lora.alpha": "lora_alpha",
        f"{ADAPTER}.backend.lora.target_modules": "target_modules lora_target lora_target_modules lora_target_linear",
        f"{ADAPTER}.backend.lora": "adapter peft_config finetuning_type",
        f"{ADAPTER}.backend.base_model": "base_model model_name_or_path",
        f"{ADAPTER}.training.learning_rate": "learning_rate lr",
        f"{ADAPTER}.training.schedule": "lr_scheduler lr_scheduler_type",
        f"{ADAPTER}.training.warmup_steps": "warmup_steps warmup_ratio",
        f"{ADAPTER}.training.beta": "kl_coef kl_loss_coef",
        "finetuning.rows_per_step, and the server divides a step by its memory": "micro_batch_size per_device_train_batch_size "
        "gradient_accumulation_steps train_batch_size",
        "finetuning.num_epochs": "num_epochs num_train_epochs total_epochs max_steps total_training_steps",
        "finetuning.validation.dataset": "val_set_size eval_dataset test_datasets",
        "finetuning.validation.interval": "evals_per_epoch eval_steps eval_strategy evaluation_strategy test_freq",
        "finetuning.validation.patience": "early_stopping_patience load_best_model_at_end",
        "finetuning.trackers": "report_to use_wandb wandb_entity",
        f"finetuning.trackers: [wandb], with {ADAPTER}.backend.project": "wandb_project",
        f"{ADAPTER}.backend.name": "wandb_run_name wandb_name run_name",
        "finetuning.output_dir": "output_dir",
        "finetuning.seed": "seed",
        "finetuning.reward_function": "reward_funcs reward_function",
        "eval.general.dataset": "datasets dataset dataset_name",
        "trajectory_builders.NAME.num_generations": "num_generations rollout_n n",
        "max_tokens of the agent's requests": "max_completion_length max_new_tokens",
        "temperature of the policy in llms, or of the agent's requests": "temperature",
        "a flag of art-server, --max-seq-length": "sequence_len cutoff_len max_seq_length",
        "nothing that is set: adapters are trained without dropout": "lora_dropout",
        f"nothing that is set: each step is a checkpoint, see {ADAPTER}.backend.delete_old_checkpoints": "save_steps saves_per_epoch "
        "save_strategy save_total_limit",
    }
)
"""Where the file has what these names mean."""

WITHOUT_EFFECT = frozenset(
    {
        *("adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "eval_steps", "eval_strategy", "fp16"),
        *("gradient_accumulation_steps", "gradient_checkpointing", "lr_scheduler_type", "max_completion_length"),
        *("max_prompt_length", "max_steps", "num_generations", "num_train_epochs", "optim", "output_dir"),
        *("per_device_eval_batch_size", "per_device_train_batch_size", "load_best_model_at_end", "report_to"),
        *(
            "resume_from_checkpoint",
            "reward_weights",
            "run_name",
            "save_steps",
            "save_strategy",
            "save_total_limit",
            "seed",
        ),
        *("temperature", "do_eval", "use_vllm", "vllm_gpu_memory_utilization", "warmup_ratio", "weight_decay"),
    }
)
"""Of these names the fields that `training` has in NVIDIA's plugin. They have no effect, and are no error. Source: `TrainerArgs` of
openpipe-art 0.5.17."""

LORA_FIELDS: Mapping[str, str] = by_name(
    {
        "adapters are trained without dropout": "dropout lora_dropout",
        "with rank-stabilised scaling write alpha * sqrt(rank) as alpha": "use_rslora",
        "the adapter alone is trained": "bias modules_to_save",
    }
)
"""What happens in place of PEFT's fields in `backend.lora`, which have no effect."""


def of_training(name: str) -> str | None:
    """What a name in `training` is here; None if no harness is known to have the name."""
    return FILE_NAMES.get(name) or OTHER_NAMES.get(name)


def with_remedy(path: str) -> str:
    """A field without effect, with where its meaning is: "...training.warmup_ratio (here it is ...training.warmup_steps)", or with
    what happens instead."""
    section, _, name = path.rpartition(".")
    if section.endswith(".backend.lora") and name in LORA_FIELDS:
        return f"{path} ({LORA_FIELDS[name]})"
    known = FILE_NAMES.get(name) if section.endswith(".training") else None
    return f"{path} (here it is {known})" if known else path


def whose(tree: Mapping[str, Any]) -> str | None:
    """The harness whose file this plainly is; None for a file of ours."""
    if "workflow" in tree:  # flags of the command may have added a section `finetuning`
        return None
    if "base_model" in tree:
        return "axolotl"
    if "model_name_or_path" in tree:
        return "TRL or LLaMA-Factory"
    return "verl" if "actor_rollout_ref" in tree else None


def remedy(tree: Mapping[str, Any]) -> str:
    """What to do instead of `art finetune` with a file of another harness."""
    model = tree.get("base_model") or tree.get("model_name_or_path") or "NAME"
    return (
        f"this is a file of {whose(tree)}. `art finetune` trains an agent with rewards: art finetune agent.py:answer --dataset FILE --reward "
        f"agent.py:score --base_model {model} needs no file, docs/finetune.md has the names of other harnesses, and `art sft FILE "
        f"--model PROJECT/NAME --base_model {model}` trains on examples (docs/howto/sft.md)"
    )
