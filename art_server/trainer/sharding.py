"""The base's weights divided among the ranks of a gang, where they do not fit one card (FSDP2, torch's `fully_shard`).

Each decoder layer's weights are gathered for its passes and dropped again. Embedding, last norm and head stay whole, because
`Policy` also reads the head by columns. The base's weights are frozen, so that only the adapter's gradient is reduced. The
adapter stays whole on every rank.
"""

import logging

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from art_server.trainer.gang_view import GangView

logger = logging.getLogger(__name__)


def shard_base(base: PreTrainedModel, gang: GangView, device: torch.device) -> PreTrainedModel:
    """Moves the model from main memory to the ranks' devices, layer after layer, and returns it."""
    mesh = init_device_mesh(device.type, (gang.size,))
    layers = [module for module in base.get_decoder().modules() if isinstance(module, GradientCheckpointingLayer)]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    whole = sum(parameter.nbytes for parameter in parameters)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    own = 0
    for layer in layers:
        for parameter in layer.parameters():
            if isinstance(parameter, DTensor):
                own += parameter.to_local().nbytes
    logger.info("rank %d holds %d of %d bytes of the layers", gang.rank, own, whole)
    for module in base.modules():
        for name, values in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            # `fully_shard` has moved the weights of the layers.
            if values.device != device and not isinstance(values, DTensor):
                _move(module, name, device)
    return base


def _move(module: torch.nn.Module, name: str, device: torch.device) -> None:
    values = getattr(module, name)
    if isinstance(values, torch.nn.Parameter):
        # In place: embedding and head may share one parameter.
        values.data = values.data.to(device)
    else:
        setattr(module, name, values.to(device))
