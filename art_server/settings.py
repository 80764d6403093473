"""The server's settings: one frozen record, built once in `cli.py` and passed on explicitly."""

import functools
import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from art.wire import Name

Scope = Literal["infer", "train"]
Device = Literal["cpu", "cuda"]
Handover = Literal["none", "kv_cache", "sleep"]

ENGINE_ARGS = frozenset(
    {
        "block_size",
        "enable_prefix_caching",
        "enforce_eager",
        "gpu_memory_utilization",
        "kv_cache_dtype",
        "max_logprobs",
        "max_num_batched_tokens",
        "max_num_seqs",
        "pipeline_parallel_size",
        "quantization",
        "reasoning_parser",
        "seed",
        "tensor_parallel_size",
        "tool_call_parser",
    }
)
"""vLLM arguments that `--engine-arg` takes. Those that our own flags set (model, dtype, lengths, LoRA) and those that
open files or sockets are left out on purpose."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The maximal ranks that vLLM can be started with."""


def _in_utc(time: datetime) -> datetime:
    return time.astimezone(UTC) if time.tzinfo is not None else time.replace(tzinfo=UTC)


class ApiKey(BaseModel):
    """One key, what it opens, and its limits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str = Field(min_length=1, repr=False)
    scopes: frozenset[Scope] = frozenset({"infer", "train"})
    projects: frozenset[str] | None = None
    """None: every project."""
    name: Name | None = None
    """Whose key it is. Jobs and limits are the name's, so that they outlive the key."""
    expires: Annotated[datetime, AfterValidator(_in_utc)] | None = None
    """The first moment at which the key is refused; without a time zone it is UTC."""
    requests_per_minute: int | None = Field(default=None, ge=1, le=100_000)
    """In any sixty seconds. At most 100,000, because the time of each is kept."""
    concurrent: int | None = Field(default=None, ge=1)
    """Requests at a time; a stream counts until it ends."""

    @functools.cached_property
    def owner(self) -> str:
        """The name, else a hash that does not reveal the key."""
        return self.name or hashlib.sha256(self.key.encode()).hexdigest()[:16]

    @property
    def is_expired(self) -> bool:
        return self.expires is not None and self.expires <= datetime.now(UTC)

    @property
    def is_limited(self) -> bool:
        return self.requests_per_minute is not None or self.concurrent is not None


class ServerConfig(BaseModel):
    """Everything that the command line decides."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=7623, ge=0, le=65535)
    inference_port: int = Field(default=8000, ge=0, le=65535)
    inference_port_required: bool = False
    """Set when the port was asked for explicitly: then a taken one is an error and not a warning."""
    path: Path = Path(".art")
    base_model: str | None = None
    api_keys: tuple[ApiKey, ...] = ()
    api_key_file: Path | None = None
    """Where some of the keys come from; read again on SIGHUP."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    """PEM files. Both, or neither for plain HTTP."""
    max_seq_length: int | None = Field(default=None, ge=16)
    """Tokens of prompt plus completion; None takes the model's own, at most 8,192 on a CPU."""
    max_lora_rank: int = 16
    max_loras: int = Field(default=4, ge=2)
    """Adapters that one engine batch may mix. Two at least: requests frozen by a step finish on the adapter before."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    trainer: Literal["auto", "peft", "unsloth"] = "auto"
    trainer_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    serve_devices: tuple[int, ...] = ()
    train_devices: tuple[int, ...] = ()
    """Engine and trainer each have devices of their own, and take no turns: GPUs as torch counts them, or a CPU's cores.
    Empty: they share."""
    handover: Literal["auto"] | Handover = "auto"
    """What the engine gives up for a step on a GPU that the trainer uses too (`device/plan.py`)."""
    max_tokens_per_micro_batch: int | None = Field(default=None, ge=64)
    """Of the trainer; None is what fits the device."""
    exact: bool = False
    """Float32 on both sides, and no step whose gap is above what float32 rounds."""
    gap_limit: float | None = Field(default=None, ge=0)
    """Mean gap between the engine's log-probabilities and the trainer's above which a step trains nothing. None: what
    docs/precision.md measured, times four; 0: no limit."""
    kv_cache_gb: int = Field(default=1, ge=1)
    """Memory for the engine's KV cache on a CPU, in GiB; on CUDA `gpu_memory_utilization` decides."""
    engine_args: Mapping[str, str] = {}
    wait_limit_seconds: float = Field(default=1800.0, gt=0)
    """How long an inference request waits for a training step or an engine start before it gets a 503."""
    max_queued_jobs: int = Field(default=1000, ge=1)
    """Jobs that may wait; further train requests get a 429."""
    keep_last: int = Field(default=50, ge=0)
    """Steps of a model that are kept beside the best; 0 keeps all. Fifty are 0.5 GB of adapters at 135M parameters, 8 GB at
    8B and rank 16, and longer than a run's reward takes to show that it went wrong."""
    max_body_mb: int = Field(default=512, ge=1)
    splicing: bool = True
    """Give the engine the exact tokens of a conversation's past in place of their re-rendering."""
    ledger_max_gb: float = Field(default=4.0, gt=0)
    ledger_max_age_days: float = Field(default=7.0, gt=0)
    exit_with_parent: bool = False
    legacy_without_key: bool = False
    """Open the routes of the ART wire, and only them, to callers without a key."""

    @model_validator(mode="after")
    def _check_exact(self) -> Self:
        if self.exact and {self.dtype, self.trainer_dtype} - {"auto", "float32"}:
            raise ValueError("--exact computes in float32: leave out --dtype and --trainer-dtype")
        return self

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together: give both, or none")
        return self

    @model_validator(mode="after")
    def _check_devices(self) -> Self:
        if bool(self.serve_devices) != bool(self.train_devices):
            raise ValueError("--serve-devices and --train-devices go together: give both, or none")
        if both := set(self.serve_devices) & set(self.train_devices):
            raise ValueError(f"device {min(both)} is both in --serve-devices and --train-devices")
        if self.train_devices and self.handover != "auto":
            raise ValueError(
                "--handover is for a GPU that both use: leave it out with --train-devices"
            )
        return self

    @property
    def takes_turns(self) -> bool:
        """Whether engine and trainer use the same devices."""
        return not self.train_devices

    def number_types(self, device: Device) -> tuple[str, str]:
        """Of the engine and of the trainer's base weights: float32 on a CPU, where it costs the engine nothing and
        lets a model learn faster than bfloat16 (docs/precision.md)."""
        usual = "bfloat16" if device == "cuda" and not self.exact else "float32"
        engine = usual if self.dtype == "auto" else self.dtype
        return engine, usual if self.trainer_dtype == "auto" else self.trainer_dtype

    def with_wishes(self, wishes: Mapping[str, str], max_positions: int) -> "ServerConfig":
        """These settings, filled up by a client's `max_seq_length` and engine arguments where they say nothing."""
        engine_args = {**wishes, **self.engine_args}
        wished = engine_args.pop("max_seq_length", None)
        length = self.max_seq_length
        if length is None and wished is not None:
            length = min(int(wished), max_positions)
        return self.model_copy(update={"max_seq_length": length, "engine_args": engine_args})

    @property
    def server_dir(self) -> Path:
        """Where the server keeps its own state, beside the projects; no project can bear this name."""
        return self.path / ".server"

    @property
    def log_dir(self) -> Path:
        return self.path / "logs"
