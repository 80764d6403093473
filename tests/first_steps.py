"""Step 0 on a base model of a test, whose record is made in this process and has only what an adapter needs."""

from pathlib import Path

from art_protocol.wire import LoRAConfig
from art_server.engine.inspection_process.adapter import read_adapter_config
from art_server.store.base_facts import Facts
from art_server.store.base_models import BaseModel
from art_server.store.first_step import write_first_step
from art_server.trainer.base import meta_model
from art_server.trainer.layers import find_layers


def known_base(base_model: str | Path) -> BaseModel:
    """The base model in a folder."""
    model = meta_model(str(base_model))
    layers = find_layers(model)
    base = BaseModel(str(base_model), Path(base_model))
    vars(base)["facts"] = Facts(model_type="toy", layers=layers, adapter_config=read_adapter_config(model, layers))
    return base


def write_first_checkpoint(base_model: str, lora: LoRAConfig, seed: int, folder: Path) -> None:
    """Writes step 0 of an adapter into a folder."""
    write_first_step(known_base(base_model), lora, folder, seed)
