"""The base's weights divided among the ranks of a gang, where they do not fit one card (FSDP2, torch's `fully_shard`).

Each decoder layer's weights are gathered for its passes and dropped again. Embedding, last norm and head stay whole, because
the head is also read by columns. Weights are frozen, so that nothing but the adapter is reduced; it stays whole on every rank.
"""

import logging

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from art_server.trainer.gang import Gang

logger = logging.getLogger(__name__)


def shard_base(base: PreTrainedModel, gang: Gang, device: torch.device) -> PreTrainedModel:
    """The model on the ranks' devices, from main memory, layer after layer."""
    mesh = init_device_mesh(device.type, (gang.size,))
    layers = [each for each in base.get_decoder().modules() if isinstance(each, GradientCheckpointingLayer)]
    parameters = [each for layer in layers for each in layer.parameters()]
    whole = sum(each.nbytes for each in parameters)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    own = sum(each.to_local().nbytes for layer in layers for each in layer.parameters() if isinstance(each, DTensor))
    logger.info("rank %d holds %d of %d bytes of the layers", gang.rank, own, whole)
    for module in base.modules():
        for name, values in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if values.device != device and not isinstance(values, DTensor):
                _move(module, name, device)
    return base


def _move(module: torch.nn.Module, name: str, device: torch.device) -> None:
    values = getattr(module, name)
    if isinstance(values, torch.nn.Parameter):
        values.data = values.data.to(device)
    else:
        setattr(module, name, values.to(device))
