"""Registration: from a name and a base model to a model with step 0 on disk."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from art.wire import LoRAConfig, ModelInfo, RegisterRequest
from art_server import base_models
from art_server.base_loader import BaseLoader
from art_server.engine.engine import Engine
from art_server.errors import Conflict
from art_server.jobs.resolve import Limits
from art_server.jobs.trainer import Trainer
from art_server.jobs.trainer_process import TrainerError
from art_server.shared.tasks import InitTask
from art_server.store import files
from art_server.store.model_folder import CheckpointRecord, ModelRecord
from art_server.store.registry import Model, Registry, check_lora, check_rank

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Registration:
    """Registers models, and compares them with the loaded base model."""

    _registry: Registry
    _base: BaseLoader
    _engine: Engine
    _trainer: Trainer
    _making: asyncio.Lock
    """Held while a model is created or deleted."""
    _max_lora_rank: int

    async def register(
        self,
        request: RegisterRequest,
        requested: Mapping[str, str] | None = None,
        *,
        always_logprobs: bool = False,
    ) -> ModelInfo:
        """Registers a model and writes its step 0. A model that is already registered keeps its steps.

        `requested` engine arguments apply if this call starts the engine. `always_logprobs` (see `ModelRecord`) stays
        set once it is set.

        Raises:
            InvalidInput: the base model is unknown, or the rank is above the engine's maximum.
            Conflict: the base model is not the loaded one, or the model has another base model or adapter shape.
        """
        folder = self._registry.folder(request.project, request.name)
        check_rank(request.lora or LoRAConfig(), self._max_lora_rank)
        model = self._registry.find(request.project, request.name)
        if model is not None:
            check_lora(model.record.lora, request.lora, model.id)
            if self._engine.base is None and model.record.base_model != request.base_model:
                raise self._other_base(model)
        base = await self._base.load(request.base_model, requested)
        if model is not None and not self.is_on_base(model):
            raise self._other_base(model)
        async with self._making:
            model = self._registry.find(request.project, request.name)
            if model is None:
                record = ModelRecord(
                    name=request.name,
                    project=request.project,
                    base_model=base.name,
                    lora=request.lora or LoRAConfig(),
                )
                await self._write_first_step(record)
                with files.disk_errors("the model"):
                    await asyncio.to_thread(folder.create, record, self._engine.log_path)
                model = self._registry.add(folder, record)
                logger.info("registered %s on %s", model.id, record.base_model)
            if always_logprobs and not model.record.always_logprobs:
                model.record = model.record.model_copy(update={"always_logprobs": True})
                await asyncio.to_thread(folder.create, model.record, self._engine.log_path)
        return self.info(model)

    def _other_base(self, model: Model) -> Conflict:
        loaded = f"'{self._engine.base.name}'" if self._engine.base is not None else "none"
        return Conflict(
            f"model '{model.id}' adapts base model '{model.record.base_model}'; this server has {loaded} loaded: use "
            f"base_model='{model.record.base_model}' on a separate server, or another model name",
            code="base_model_differs",
            param="base_model",
        )

    async def _write_first_step(self, record: ModelRecord) -> None:
        folder = self._registry.folder(record.project, record.name)
        if not folder.exists() and folder.steps() == [0]:
            # A registration was cut off, perhaps one with another adapter shape.
            await asyncio.to_thread(folder.remove_steps, [0])
        if folder.newest_step() is not None:
            return
        temporary = await asyncio.to_thread(folder.new_checkpoint_dir)
        try:
            await self._trainer.run(InitTask(lora=record.lora, out_dir=str(temporary)))
            first = CheckpointRecord(step=0)
            await asyncio.to_thread(folder.commit_checkpoint, temporary, first)
        except TrainerError as error:
            what = f"cannot create an adapter of this shape for '{record.base_model}'"
            raise error.for_client(what, "lora") from error
        finally:
            folder.clear_temporary()

    def info(self, model: Model) -> ModelInfo:
        return ModelInfo(
            name=model.record.name,
            project=model.record.project,
            base_model=model.record.base_model,
            step=model.step,
            inference_name=model.id,
            lora=model.record.lora,
            max_seq_length=self._engine.max_seq_length,
        )

    def is_on_base(self, model: Model) -> bool:
        """Whether the model adapts the loaded base model."""
        base = self._engine.base
        return base is not None and model.record.base_model == base.name

    def check_trainable(self, model: Model) -> None:
        """Checks that the model can be trained now.

        Raises:
            Conflict: the model's base model is not loaded.
        """
        if not self.is_on_base(model):
            raise self._other_base(model)

    def limits(self, model: Model) -> Limits:
        """The limits for trajectories of a model.

        Raises:
            Conflict: the model's base model is not loaded.
        """
        self.check_trainable(model)
        base, length = self._engine.base, self._engine.max_seq_length
        assert base is not None and length is not None, "known with the base"
        return Limits(vocab_size=base_models.vocab_size(base.path), max_seq_length=length)
