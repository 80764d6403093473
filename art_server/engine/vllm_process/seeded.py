"""Seeded requests on a CPU. While a prompt is computed in parts, vLLM throws samples away, and takes their random numbers back by
the generator's offset. Generators of a CPU have no offset: one such request would end the engine."""

import functools
from typing import Any

import numpy as np
import torch

from art_server.engine.vllm_process.kept_sets import patch_target


class Rewindable(torch.Generator):
    """A generator with which vLLM can take back the last sample."""

    before: torch.Tensor | None = None
    """The generator's state before a sample that will be thrown away."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        """Takes the last sample back; vLLM sets an offset for nothing else."""
        del offset
        if self.before is not None:
            self.set_state(self.before)
        return self


def install() -> None:
    """Gives requests with a seed a `Rewindable` generator.

    Raises:
        ImportError: vLLM's model runner has changed.
    """
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    add, sample = patch_target(InputBatch, "add_request"), patch_target(GPUModelRunner, "_sample")

    @functools.wraps(add)
    def add_rewindable(self: Any, request: Any) -> Any:
        generator = request.generator
        if generator is not None and not isinstance(generator, Rewindable):
            request.generator = Rewindable()
            request.generator.set_state(generator.get_state())
        return add(self, request)

    @functools.wraps(sample)
    def sample_and_remember(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = self.input_batch
        for index in np.nonzero(self.discard_request_mask.np[: batch.num_reqs])[0]:
            generator = batch.generators.get(int(index))
            if generator is not None:
                generator.before = generator.get_state()
        return sample(self, *args, **kwargs)

    InputBatch.add_request = add_rewindable
    GPUModelRunner._sample = sample_and_remember
