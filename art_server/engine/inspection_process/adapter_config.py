"""The configuration of an adapter of a base model, as PEFT writes it, from the model without weights."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from transformers import PreTrainedModel

from art_protocol.wire import LoRAConfig
from art_server.store.adapter_layers import Layers
from art_server.store.adapter_tensors import tensor_shapes
from art_server.store.model_folder import CONFIG_FILE
from art_server.trainer.base import adapter_tensors, peft_config


def read_adapter_config(model: PreTrainedModel, layers: Layers) -> dict[str, Any]:
    """PEFT's adapter_config.json of an adapter of all layers that take one. The model has this adapter afterwards.

    Any: PEFT's fields.

    Raises:
        ValueError: PEFT refuses a layer, or its adapter has other tensors than the server writes.
    """
    lora = LoRAConfig()
    with torch.device("meta"):
        adapted = get_peft_model(model, peft_config(lora, model))
    assert isinstance(adapted, PeftModel)
    shapes = {name: tuple(tensor.shape) for name, tensor in adapter_tensors(adapted).items()}
    expected = tensor_shapes(layers, lora)
    if list(shapes.items()) != list(expected.items()):
        different = sorted({*shapes.items()} ^ {*expected.items()})
        raise ValueError(f"its adapter would have other tensors, such as {different[:2]}, or another order of them")
    config = adapted.peft_config["default"]
    # As PEFT's own `save_pretrained` of a model writes it.
    config.inference_mode = True
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return json.loads((Path(folder) / CONFIG_FILE).read_text())
