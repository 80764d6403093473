"""Step 0 on a base model of a test, whose record is made in this process and has only what an adapter needs."""

import functools
from pathlib import Path

from transformers import PreTrainedModel

from art_protocol.wire import LoRAConfig
from art_server.engine.inspection_process.adapter_config import read_adapter_config
from art_server.store.base_facts import Facts
from art_server.store.base_models import BaseModel
from art_server.store.first_step import write_first_step
from art_server.trainer.base import meta_model
from art_server.trainer.layers import find_layers


def known_base(model: PreTrainedModel, path: Path) -> BaseModel:
    """The base model in the folder `path`, which need not exist. The model has an adapter afterwards."""
    layers = find_layers(model)
    facts = Facts(model_type="toy", layers=layers, adapter_config=read_adapter_config(model, layers))
    base = BaseModel("toy", path)
    vars(base)["facts"] = Facts.model_validate_json(facts.model_dump_json())  # as from the disk
    return base


@functools.cache
def base_in(folder: str) -> BaseModel:
    """The base model in a folder, which nobody changes."""
    return known_base(meta_model(folder), Path(folder))


def write_first_checkpoint(base_model: str, lora: LoRAConfig, seed: int, folder: Path) -> None:
    """Writes step 0 of an adapter on the base model in a folder."""
    write_first_step(base_in(base_model), lora, folder, seed)
