"""The tasks of the trainer process: one JSON line each, and so are the answers (shared/trainer_messages.py).

Every task starts from the checkpoint that it names, so it does not depend on earlier tasks.
"""

import gc
import logging
import platform
import signal
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO

import torch
from pydantic import TypeAdapter, ValidationError

from art_server import __version__
from art_server.shared.same_policy import GapTooLarge
from art_server.shared.trainer_messages import (
    UNLIKE_RANKS,
    Done,
    Failed,
    LayersTask,
    Learned,
    Progress,
    Task,
    WorkerConfig,
)
from art_server.store import files
from art_server.trainer.facts import find_device
from art_server.trainer.gang_view import ALONE, GangView, OtherRankFailed, UnlikeRanks, is_lost_connection
from art_server.trainer.job import train
from art_server.trainer.memory import free_cached_memory, is_out_of_memory
from art_server.trainer.optimizer import make_optimizer
from art_server.trainer.policy import Policy
from art_server.trainer.probe import write_layer_probes
from art_server.trainer.token_budget import TryAgainWithLess

logger = logging.getLogger(__name__)

TASK = TypeAdapter[Task](Task)


class Cancelled(Exception):
    """The server cancelled the task."""


OUT_OF_MEMORY_ADVICE = (
    "Lower the trainer's --max-tokens-per-micro-batch, send shorter trajectories, or register the model with a lower"
    " LoRA rank"
)


class Worker:
    """Holds the policy between tasks, so that the base is loaded once."""

    def __init__(self, config: WorkerConfig, answers: BinaryIO) -> None:
        self._config = config
        self._dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
        self._device = find_device(config.device)
        self._answers = answers
        self._policy: Policy | None = None
        self._gang = ALONE
        self._is_cancelled = False

    def serve(self, tasks: BinaryIO) -> None:
        """Answers each line until the stream ends, as it also does when the server dies. SIGUSR1 cancels a train task before
        its next micro-batch."""
        signal.signal(signal.SIGUSR1, self._cancel)
        while line := tasks.readline():
            self._answer(self._handle(line))

    def _handle(self, line: bytes) -> Done | Failed:
        try:
            task = TASK.validate_json(line)
        except ValidationError as error:
            # Without the input: a line is tens of megabytes.
            return Failed(
                code="bad_task",
                message=str(error.errors(include_input=False, include_url=False)[:3]),
            )
        # A step that did not end is still on the device, which the engine needs.
        is_dropped = task.kind in ("train", "layers") and self._config.between_steps != "stay"
        try:
            return self._run(task)
        except FloatingPointError as error:
            failed = Failed(code="non_finite", message=str(error))
        except GapTooLarge as error:
            failed = Failed(code="gap_too_large", message=str(error))
        except Cancelled:
            failed = Failed(code="cancelled", message="the job was cancelled", retryable=True)
        except TryAgainWithLess as error:
            failed = Failed(code="out_of_memory", message=str(error), retryable=True)
        except UnlikeRanks as error:
            failed = Failed(code=UNLIKE_RANKS, message=str(error), retryable=True)
        except OtherRankFailed as error:
            failed = Failed(code="other_rank_failed", message=str(error), retryable=True)
        except Exception as error:
            if isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error):
                raise  # no later call on the device would succeed; the server starts another process
            # The process's outermost handler: the server decides whether the job is retried. The state of the model that
            # was in use is unknown, so the next task loads the base again.
            is_dropped = True
            traceback.print_exc()
            if is_lost_connection(error):
                failed = Failed(code="other_rank_failed", message=f"another rank is lost: {error}", retryable=True)
            elif is_disk_full(error):
                failed = Failed(code="no_disk_space", message=str(error), retryable=True)
            elif is_out_of_memory(error):
                failed = Failed(code="out_of_memory", message=f"{error}. {OUT_OF_MEMORY_ADVICE}")
            else:
                failed = Failed(code="trainer_error", message=f"{type(error).__name__}: {error}")
        # Behind the handlers: inside them the exception's traceback still holds the step's tensors.
        if is_dropped:
            self._policy = None
        gc.collect()
        free_cached_memory()
        return failed

    def _run(self, task: Task) -> Done:
        policy = self._load_policy()
        if task.kind == "load":
            return Done(metrics={"num_parameters": float(policy.num_parameters)})
        if task.kind == "layers":
            return self._probe_layers(policy, task)
        max_tokens = self._config.max_tokens_per_micro_batch or policy.default_tokens
        self._is_cancelled = False  # a signal may have come after the task that it meant
        try:
            done = train(
                policy,
                task,
                max_tokens,
                self._report,
                between_steps=self._config.between_steps,
                learn=self._learn,
                base_name=self._config.base_name,
            )
        finally:
            policy.drop_gradients()
        environment = done.environment | self._environment(policy)
        done = done.model_copy(update={"environment": environment})
        # This name would keep the model in memory during `_rest`.
        del policy
        self._rest()
        return done

    def _probe_layers(self, policy: Policy, task: LayersTask) -> Done:
        policy.return_to_device()
        policy.use_context(task.max_seq_length)
        probes = write_layer_probes(policy, task.lora, Path(task.out_dir), task.mismatch_limits)
        if self._config.between_steps != "stay":
            # `leave_device` also moves an optimizer's state; this one has none.
            optimizer = make_optimizer(policy.parameters, 0.0)
            policy.leave_device(optimizer, keep_copy=self._config.between_steps == "leave")
        del policy
        self._rest()
        return Done(metrics={}, layer_probes=probes)

    def _rest(self) -> None:
        """Frees the memory that a task leaves behind: the engine needs it on a device that both share."""
        if self._config.between_steps == "reload":
            self._policy = None
            gc.collect()
        free_cached_memory()

    def _environment(self, policy: Policy) -> dict[str, str]:
        """What decides the last bits of a result beside the task and its token budget."""
        return {
            "trainer": policy.name,
            "device": str(policy.device),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "threads": str(torch.get_num_threads()),
            "dtype": str(policy.dtype).removeprefix("torch."),
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "peft")},
            "agent-reinforcement-trainer": __version__,
        }

    def _cancel(self, *_: object) -> None:
        self._is_cancelled = True

    def _report(self, progress: Progress) -> None:
        """Sends progress to the server. This runs after each micro-batch, so a cancelled task ends here."""
        # At "save" the server wakes the engine on the device (`jobs/attempt.py`), and only files are left to write.
        if self._is_cancelled and progress.phase != "save":
            raise Cancelled
        self._answer(progress)

    def _learn(self, key: str, tokens: int) -> None:
        self._answer(Learned(key=key, tokens=tokens))

    def _load_policy(self) -> Policy:
        config = self._config
        if self._gang.size < config.num_ranks:
            assert config.meeting is not None and self._device is not None, "the ranks of a gang have a place to meet"
            self._gang = GangView.join(
                *(config.rank, config.num_ranks, config.meeting, self._device),
                is_sharded=config.is_sharded,
                machine=config.machine,
            )
        if self._policy is None:
            self._policy = self._make_policy()
            if self._config.checkpointing_factor is not None:
                self._policy.checkpointing_factor = self._config.checkpointing_factor
            logger.info(
                "loaded %s with %s on %s",
                self._config.base_model,
                self._policy.name,
                self._policy.device,
            )
        return self._policy

    def _make_policy(self) -> Policy:
        if self._config.trainer != "unsloth":
            return Policy(self._config.base_model, self._dtype, self._device, self._gang)
        try:
            # Imported here, because Unsloth is optional and slow to import.
            from art_server.trainer.unsloth_policy import UnslothPolicy
        except (ImportError, RuntimeError, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"--trainer unsloth: Unsloth cannot be imported here ({reason}): install "
                "'.[gpu]' in a clone of the repository on a machine with a GPU, or use --trainer peft"
            ) from error
        return UnslothPolicy(self._config.base_model, self._dtype, self._device, self._config.max_seq_length)

    def _answer(self, answer: Progress | Learned | Done | Failed) -> None:
        self._answers.write(answer.model_dump_json().encode() + b"\n")
        self._answers.flush()


def is_disk_full(error: Exception) -> bool:
    """Whether a write failed because the disk is full; safetensors has no error code, only a message."""
    return (isinstance(error, OSError) and error.errno in files.NO_ROOM) or ("No space left on device" in str(error))
