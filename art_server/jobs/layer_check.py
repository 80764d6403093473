"""Which layers of a base model the engine adapts as the trainer does. Checked before the first job, once for each base model
and the versions of the software.

vLLM ignores without a word the adapter of a layer that it folds into others when it loads the model, or whose name it does
not know. So an adapter of random weights is compared for one kind of layer at a time, as the adapter of each step is
(`shared/same_policy.py`). A kind that the engine does not adapt is not trained: its adapter stays zero, on both sides.
"""

import asyncio
import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from art_protocol.wire import LoRAConfig
from art_server.engine.device.computing import ComputingDevices
from art_server.engine.engine import PolicyDiffers
from art_server.engine.fleet import Fleet
from art_server.jobs.gang import Gang
from art_server.shared.trainer_messages import LayersTask, MismatchLimits, Probe
from art_server.store import files
from art_server.store.base_facts import facts_digest
from art_server.store.base_models import BaseModel
from art_server.store.model_folder import DESCRIPTION_FILE, CheckpointRecord

logger = logging.getLogger(__name__)

NAME = ".layers"
"""Beginning of the adapters' names in the engine. No model's project begins with a dot."""


@dataclass(frozen=True, slots=True)
class LayerCheck:
    _folder: Path
    """Keeps the answers."""
    _devices: ComputingDevices

    def known(self, base: BaseModel, limits: MismatchLimits) -> dict[str, str] | None:
        """The kinds of layers that the engine does not adapt, and why; None if that was not checked yet (blocking)."""
        file = self._file(base, limits)
        return json.loads(file.read_text()) if file.is_file() else None

    async def score(
        self,
        trainer: Gang,
        lora: LoRAConfig,
        limits: MismatchLimits,
        max_seq_length: int | None,
        folder: Path,
    ) -> list[str]:
        """Has the trainer write adapters into an empty folder and score them; returns their kinds. The trainer needs the
        device."""
        task = LayersTask(
            lora=lora.model_copy(update={"target_modules": None}),
            out_dir=str(folder),
            mismatch_limits=limits,
            max_seq_length=max_seq_length,
        )
        done = await trainer.run(task)
        await asyncio.to_thread(_describe, folder, done.layer_probes)
        return sorted(done.layer_probes)

    async def compare(
        self,
        fleet: Fleet,
        base: BaseModel,
        limits: MismatchLimits,
        folder: Path,
        kinds: Sequence[str],
        timeout_seconds: float,
    ) -> dict[str, str]:
        """Has the engine load the same adapters and score them; returns what `known` returns from then on.

        Raises:
            PolicyDiffers: the engine adapts no kind as the trainer does; this is not remembered.
        """
        # Before the comparison: an engine that joins meanwhile changes the file's name, and has compared nothing.
        file = await asyncio.to_thread(self._file, base, limits)
        lost: dict[str, str] = {}
        for kind in kinds:
            name = f"{NAME}/{kind}@0"
            try:
                await fleet.load_adapter(name, folder / kind, timeout_seconds)
            except PolicyDiffers as error:
                lost[kind] = error.fault
            finally:
                fleet.unload_adapter(name)
        if lost and len(lost) == len(kinds):
            raise PolicyDiffers(base.name, next(iter(lost.values())))
        logger.info("%s: the engine adapts %s", base.name, ", ".join(sorted({*kinds} - {*lost})))
        for kind, reason in lost.items():
            logger.warning("%s: layers %s are not trained: %s", base.name, kind, reason)
        await asyncio.to_thread(_remember, base, file, lost)
        return lost

    def _file(self, base: BaseModel, limits: MismatchLimits) -> Path:
        """Named after all that the answer depends on: the base's files, versions, number types and the engines' devices."""
        facts, engines = facts_digest(base.path, base.template), " ".join(sorted(self._devices.engines))
        name = hashlib.sha256(f"{facts} {limits.model_dump_json()} {engines}".encode()).hexdigest()
        return self._folder / f"{name}.json"


def _remember(base: BaseModel, file: Path, lost: dict[str, str]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(file, lost)
    except OSError as error:  # the next start checks again
        logger.warning("the check of %s is not kept: %s", base.name, error)


def note_lost(lost: dict[str, str]) -> list[str]:
    """The note about untrained layers for a job's report; empty if all are trained."""
    if not lost:
        return []
    reason = next(iter(lost.values()))
    return [f"layers {', '.join(sorted(lost))} are not trained: the engine does not adapt them ({reason})"]


def _describe(folder: Path, probes: dict[str, Probe]) -> None:
    for kind, probe in probes.items():
        described = CheckpointRecord(step=0, probe=probe).model_dump(mode="json")
        files.write_json(folder / kind / DESCRIPTION_FILE, described)
