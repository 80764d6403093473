"""What records leave out for programs written for ART, in front of the client's classes (`art.annexes`).

ART ignores every unknown field of trajectories and groups. Some fields of ART and of PEFT have no effect here.
"""

from typing import ClassVar

from pydantic import BaseModel


class ArtTrainConfig(BaseModel):
    _left_out: ClassVar[frozenset[str] | None] = frozenset(
        [
            "final_training_step",
            "grad_accumulation_sequences",
            "kl_penalty_coef",
            "kl_penalty_source",
            "optimizer_save_interval",
        ]
    )


class ArtLoRAConfig(BaseModel):
    _left_out: ClassVar[frozenset[str] | None] = frozenset(
        [
            "bias",
            "dropout",
            "init_lora_weights",
            "init_weights",
            "layers_pattern",
            "layers_to_transform",
            "loftq_config",
            "lora_dropout",
            "max_seq_length",
            "modules_to_save",
            "random_state",
            "temporary_location",
            "use_gradient_checkpointing",
            "use_rslora",
        ]
    )


class ArtHistory(BaseModel):
    _left_out: ClassVar[frozenset[str] | None] = None


class ArtTrajectoryGroup(ArtHistory):
    pass
