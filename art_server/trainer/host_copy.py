"""A copy of frozen weights in main memory, for the time between steps, when the weights are off the device."""

from collections.abc import Sequence

import torch


class HostCopy:
    """Copies of frozen weights, made once. While the weights are off the device, the parameters are the copies."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], device: torch.device) -> None:
        self._parameters = list(parameters)
        self._device = device
        self._copies = [parameter.detach().to("cpu", copy=True) for parameter in self._parameters]

    @property
    def num_bytes(self) -> int:
        return sum(copy.nbytes for copy in self._copies)

    def holds(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Whether this is a copy of exactly these parameters."""
        return [*map(id, parameters)] == [*map(id, self._parameters)]

    def leave(self) -> None:
        """Frees the device's memory. Nothing is copied."""
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            parameter.data = copy

    def return_to_device(self) -> None:
        """Copies the weights to the device."""
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            # On a CPU `to` alone would return the copy itself.
            parameter.data = copy.to(self._device, copy=True)
