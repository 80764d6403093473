"""Registration: from a name and a base model to a model with step 0 on disk."""

import asyncio
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

from art_protocol.wire import LoRAConfig, ModelInfo, RegisterRequest
from art_server.engine.fleet import Fleet
from art_server.errors import Conflict, InvalidInput
from art_server.jobs.token_sources import Limits
from art_server.models.base_loader import BaseLoader
from art_server.shared import clock
from art_server.store import files
from art_server.store.adapter_layers import UnknownLayers
from art_server.store.base_models import BaseModel
from art_server.store.first_step import write_first_step
from art_server.store.model_folder import CheckpointRecord, ModelFolder, ModelRecord
from art_server.store.registry import RegisteredModel, Registry, check_lora, check_rank

logger = logging.getLogger(__name__)


class Registration:
    """Registers models, and compares them with the loaded base model."""

    def __init__(self, *, registry: Registry, base: BaseLoader, fleet: Fleet, max_lora_rank: int):
        self._registry = registry
        self._base = base
        self._fleet = fleet
        self._max_lora_rank = max_lora_rank

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
            InvalidInput: the base model is unknown, the rank is above the engine's maximum, or `lora` names something else than
                layers that take an adapter.
            StorageFull: the disk has no room.
            Conflict: the base model is not the loaded one, or the model has another base model or adapter shape.
        """
        folder = self._registry.folder(request.project, request.name)
        check_rank(request.lora or LoRAConfig(), self._max_lora_rank)
        model = await self._registry.find_whole(request.project, request.name)
        if model is not None:
            check_lora(model.record.lora, request.lora, model.id)
            if self._fleet.base is None and model.record.base_model != request.base_model:
                raise self._other_base(model)
        base = await self._base.load(request.base_model, requested)
        if model is not None and not self.is_on_base(model):
            raise self._other_base(model)
        model = self._registry.find(request.project, request.name)  # the model may be gone, or new
        if model is None:
            record = ModelRecord(
                name=request.name,
                project=request.project,
                base_model=base.name,
                lora=request.lora or LoRAConfig(),
                created_at=clock.now(),
            )
            model = await self._create(folder, record, base)
            check_lora(model.record.lora, request.lora, model.id)
        if always_logprobs and not model.record.always_logprobs:
            async with self._registry.models_lock:
                if self._registry.find(request.project, request.name) is model:
                    record = model.record.model_copy(update={"always_logprobs": True})
                    await asyncio.to_thread(model.folder.create, record, self._fleet.log_path)
                    model.record = record
        return self.info(model).model_copy(update={"notes": list(base.facts.notes)})

    async def _create(self, folder: ModelFolder, record: ModelRecord, base: BaseModel) -> RegisteredModel:
        """Creates a model with its step 0. If another request has created it meanwhile, that model is returned."""
        content: Path | None = None
        try:
            if await asyncio.to_thread(lacks_first_step, folder):
                content = await asyncio.to_thread(folder.new_first_checkpoint_dir)
                await asyncio.to_thread(new_first_step, base, record.lora, content)
            async with self._registry.models_lock:
                model = self._registry.find(record.project, record.name)
                if model is None:
                    # A name that differs by case only may have been registered meanwhile.
                    self._registry.folder(record.project, record.name)
                    with files.disk_errors("the model"):
                        await asyncio.to_thread(self._publish, folder, record, content)
                    model = await asyncio.to_thread(self._registry.add, folder, record)
                    length = self._fleet.max_seq_length
                    logger.info("registered %s on %s, with a context of %s tokens", model.id, record.base_model, length)
                return model
        finally:
            if content is not None:
                await asyncio.to_thread(shutil.rmtree, content, ignore_errors=True)

    def _publish(self, folder: ModelFolder, record: ModelRecord, content: Path | None) -> None:
        if content is not None and lacks_first_step(folder):
            # A registration that was cut off may have left a step 0 of another adapter shape.
            folder.remove_steps(folder.steps())
            folder.checkpoints_dir.mkdir(parents=True, exist_ok=True)
            folder.commit_checkpoint(content, CheckpointRecord(step=0, optimizer_steps=0))
        folder.create(record, self._fleet.log_path)

    def _other_base(self, model: RegisteredModel) -> Conflict:
        loaded, own = self._fleet.base, f"base_model='{model.record.base_model}'"
        remedy = f"register it with {own}, or another model name"
        if loaded is not None:
            remedy = (
                f"this server has '{loaded.name}' loaded. Use {own} on a separate server, or another model name here"
            )
        return Conflict(
            f"model '{model.id}' adapts base model '{model.record.base_model}': {remedy}",
            code="base_model_differs",
            param="base_model",
        )

    def info(self, model: RegisteredModel) -> ModelInfo:
        return ModelInfo(
            name=model.record.name,
            project=model.record.project,
            base_model=model.record.base_model,
            step=model.step,
            inference_name=model.id,
            lora=model.record.lora,
            max_seq_length=self._fleet.max_seq_length,
        )

    def is_on_base(self, model: RegisteredModel) -> bool:
        """Whether the model adapts the loaded base model."""
        base = self._fleet.base
        return base is not None and model.record.base_model == base.name

    def check_trainable(self, model: RegisteredModel) -> None:
        """Checks that the model can be trained now.

        Raises:
            Conflict: the model's base model is not loaded.
        """
        if not self.is_on_base(model):
            raise self._other_base(model)

    def limits(self, model: RegisteredModel) -> Limits:
        """The limits for trajectories of a model.

        Raises:
            Conflict: the model's base model is not loaded.
        """
        self.check_trainable(model)
        base, length = self._fleet.base, self._fleet.max_seq_length
        assert base is not None and length is not None, "known with the base"
        return Limits(vocab_size=base.facts.vocabulary, max_seq_length=length)


def new_first_step(base: BaseModel, lora: LoRAConfig, content: Path) -> None:
    """Writes a model's step 0 into the folder `content`.

    Raises:
        InvalidInput: `lora` names something else than layers that take an adapter.
        StorageFull: the disk has no room.
    """
    try:
        write_first_step(base, lora, content)
    except UnknownLayers as error:
        raise InvalidInput(
            f"cannot create an adapter of this shape for '{base.name}': {error}", code="unknown_layers", param="lora"
        ) from error


def lacks_first_step(folder: ModelFolder) -> bool:
    """Whether the folder of a model that is not registered needs a step 0: it has no step, or only the step 0 of a
    registration that was cut off."""
    return folder.steps() in ([], [0])
