"""The server's settings: one frozen record, built once from the command line (`flags.py`) and passed on explicitly."""

import functools
import hashlib
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from art_protocol.tracking import check_tracker_name
from art_protocol.wire import Name

KeyScope = Literal["infer", "train", "host", "feedback"]
Device = Literal["cpu", "cuda"]
Handover = Literal["none", "sleep"]
NumberType = Literal["auto", "float32", "bfloat16", "float16"]

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
"""The vLLM arguments that `--engine-arg` accepts. Arguments that our own flags set (model, dtype, lengths, LoRA) and
arguments that open files or sockets are left out on purpose."""
GPU_ENGINE_ARGS = frozenset({"gpu_memory_utilization"})
"""Engine arguments that a client may request for engines on GPUs only. On a CPU vLLM takes the number as a share of main memory,
which other programs use."""
OWN_ENGINE_ARGS = frozenset({"max_seq_length", "record_distributions"})
"""What a client may request beside `ENGINE_ARGS`: settings of ours, which have their own flags."""

LoraRank = Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]
"""The maximum ranks that vLLM can be started with."""

KEY_VARIABLE = "ART_API_KEY"
KEY_LINE = "KEY [SCOPES [PROJECTS]] [name=NAME] [expires=TIME]"


def _check_origin(origin: str) -> str:
    if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+", origin):
        raise ValueError(f"'{origin}' is no web origin: write one as browsers do, such as https://shop.example")
    return origin


def _in_utc(time: datetime) -> datetime:
    return time.astimezone(UTC) if time.tzinfo is not None else time.replace(tzinfo=UTC)


class ApiKey(BaseModel):
    """One key, and what it permits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str = Field(min_length=1, repr=False)
    scopes: frozenset[KeyScope] = frozenset({"infer", "train"})
    projects: frozenset[str] | None = None
    """None: every project."""
    name: Name | None = None
    """The owner of the key. Keys for single models belong to the name, so that they outlive the key."""
    expires: Annotated[datetime, AfterValidator(_in_utc)] | None = None
    """The first moment at which the key is refused; without a time zone it is UTC."""

    @functools.cached_property
    def owner(self) -> str:
        """The key's name, or else a hash that does not reveal the key."""
        return self.name or hashlib.sha256(self.key.encode()).hexdigest()[:16]

    @property
    def is_expired(self) -> bool:
        return self.expires is not None and self.expires <= datetime.now(UTC)


class Flag(NamedTuple):
    """How the command line shows a setting. In the help, `%(default)s` becomes the default."""

    help: str
    metavar: str | None = None
    name: str | None = None
    """None: the field's name."""


class ServerConfig(BaseModel):
    """Every setting. `flags.py` builds the flags of `art-server`, their help and docs/settings.md from this record."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: Annotated[str, Flag("address to listen on; all but loopback need an API key (%(default)s)")] = "127.0.0.1"
    port: Annotated[int, Flag("control port, which also serves /v1; 0 chooses a free one (%(default)s)")] = Field(
        default=7623, ge=0, le=65535
    )
    inference_port: Annotated[
        int | None,
        Flag(
            "second port, which serves /v1 only; 0 chooses a free one (8000; if 8000 is in use, the server logs a "
            "warning and continues without this port)"
        ),
    ] = Field(default=None, ge=0, le=65535)
    path: Annotated[Path, Flag("folder for checkpoints, history, jobs and logs (%(default)s)")] = Path(".art")
    base_model: Annotated[
        str | None,
        Flag(
            "Hugging Face id, folder, 'art/tiny' or 'smollm2' (the base model of the first registered model; after a "
            "restart, the one that served last)"
        ),
    ] = None
    chat_template: Annotated[
        Path | None,
        Flag("file with a chat template (Jinja) for the base model (its own)", "FILE"),
    ] = None
    api_keys: Annotated[
        tuple[ApiKey, ...],
        Flag(
            f"API key with all scopes and projects; repeatable; also read from the environment variable {KEY_VARIABLE}",
            "KEY",
            "api-key",
        ),
    ] = ()
    api_key_file: Annotated[
        Path | None,
        Flag(
            f"file with one key per line: {KEY_LINE}; scopes are 'infer', 'train', 'feedback' and 'host', such as 'infer,train', times default to "
            "UTC (SECURITY.md)",
            "FILE",
        ),
    ] = None
    cors_origins: Annotated[
        tuple[Annotated[str, AfterValidator(_check_origin)], ...],
        Flag(
            "web origin whose pages may call the server from a browser, such as https://shop.example; repeatable; '*', all "
            "origins, needs API keys (none; SECURITY.md)",
            "ORIGIN",
            "cors-origin",
        ),
    ] = ()
    max_seq_length: Annotated[
        int | None,
        Flag("maximum of prompt plus completion, in tokens (the model's own; on a CPU at most 8192)"),
    ] = Field(default=None, ge=16)
    max_lora_rank: Annotated[LoraRank, Flag("maximum LoRA rank of a model (%(default)s)")] = 16
    max_loras: Annotated[int, Flag("maximum number of adapters in one engine batch, 2 or more (%(default)s)")] = Field(
        default=4, ge=2
    )
    """At least two, because requests that a step froze finish on the earlier adapter."""
    dtype: Annotated[
        NumberType,
        Flag("number type of the engine (auto: float32 on a CPU, bfloat16 on CUDA)"),
    ] = "auto"
    trainer: Annotated[
        Literal["auto", "peft", "unsloth"],
        Flag("implementation of the trainer; auto is peft; unsloth needs CUDA and the extra `gpu` (docs/training.md)"),
    ] = "auto"
    trainer_dtype: Annotated[
        NumberType,
        Flag("number type of the base weights in the trainer (auto: float32 on a CPU, bfloat16 on CUDA)"),
    ] = "auto"
    serve_devices: Annotated[
        tuple[int, ...],
        Flag(
            "devices for the engine only, such as 0 or 0,1 or 0-3: GPUs, or cores of a CPU; needs --train-devices; "
            "sampling then continues while the trainer works (engine and trainer share the devices)",
            "LIST",
        ),
    ] = ()
    train_devices: Annotated[
        tuple[int, ...],
        Flag("devices for the trainer only: a GPU for each rank, or cores of a CPU", "LIST"),
    ] = ()
    ranks: Annotated[
        int | None,
        Flag(
            "number of processes that train each job together, each with its own GPU or its part of the cores; 0 leaves training "
            "to other machines (the GPUs of --train-devices, else 1)",
            "W",
        ),
    ] = Field(default=None, ge=0)
    gangs: Annotated[
        int,
        Flag(
            "number of jobs that train at the same time, of different models, each with its own ranks; needs --train-devices "
            "(%(default)s)",
            "M",
        ),
    ] = Field(default=1, ge=1)
    shard: Annotated[
        Literal["auto", "on", "off"],
        Flag("divide the base model's weights among the ranks (auto: where they do not fit one GPU)"),
    ] = "auto"
    engines: Annotated[
        int,
        Flag(
            "number of engines, each with its part of the GPUs; requests of a session go to the same one, and a lost one's "
            "to the others; 0 leaves sampling to other machines (%(default)s)",
            "N",
        ),
    ] = Field(default=1, ge=0)
    cluster: Annotated[
        str | None,
        Flag(
            "have Ray place --engines and --ranks on its machines: 'auto' is the Ray that RAY_ADDRESS names, else one that the "
            "server starts; or the address of a Ray of which this machine is a node; needs the extra `cluster` "
            "(docs/howto/hosts.md)",
            "auto|ADDRESS",
        ),
    ] = None
    handover: Annotated[
        Literal["auto", "none", "sleep"],
        Flag(
            "whether the engine gives up its memory for a step, on a GPU that the trainer uses too (auto: sleep where both do "
            "not fit)"
        ),
    ] = "auto"
    max_tokens_per_micro_batch: Annotated[
        int | None,
        Flag("maximum number of tokens in one micro-batch of the trainer (as many as fit the device)"),
    ] = Field(default=None, ge=64)
    exact: Annotated[
        bool,
        Flag(
            "float32 in engine and trainer; a step trains nothing if their log-probabilities differ by more than 4e-5 "
            "on average or by more than 4e-4 at one token"
        ),
    ] = False
    gap_limit: Annotated[
        float | None,
        Flag(
            "a step trains nothing if the mean difference between the engine's and the trainer's log-probabilities is "
            "above this (0.5 if one of their number types is bfloat16, else 0.12 if one is float16, else 4e-4; 4e-5 with "
            "--exact); 0: no limit",
            "MEAN",
        ),
    ] = Field(default=None, ge=0)
    record_distributions: Annotated[
        bool,
        Flag(
            "on a GPU: record what each token was sampled from under a temperature, top_k, top_p, min_p or a grammar, with "
            "vLLM's earlier model runner and without FlashInfer's sampler; without this flag such tokens are trained with "
            "ratio 1, and the report counts them; a CPU always records, and so does --exact"
        ),
    ] = False
    kv_cache_gb: Annotated[int, Flag("engine's KV cache on a CPU, in GiB (%(default)s)")] = Field(default=1, ge=1)
    engine_args: Annotated[
        Mapping[str, str],
        Flag(
            f"argument that is passed to vLLM; repeatable; NAME is one of: {', '.join(sorted(ENGINE_ARGS))}",
            "NAME=VALUE",
            "engine-arg",
        ),
    ] = {}
    wait_limit_seconds: Annotated[
        float,
        Flag(
            "how long an inference request waits for a training step or the engine before a 503 (%(default)s)",
            "SECONDS",
            "wait-limit",
        ),
    ] = Field(default=1800.0, gt=0)
    keep_last: Annotated[
        int,
        Flag(
            "number of newest steps of each model that are kept, besides the best one; 0 keeps all (%(default)s)",
            "N",
        ),
    ] = Field(default=50, ge=0)
    """Fifty adapters take 0.5 GB at 135M parameters, 8 GB at 8B and rank 16. A run's reward shows within fewer steps
    that the run went wrong."""
    rollouts_max_gb: Annotated[
        float,
        Flag(
            "maximum size of the rollouts and token records that each model keeps, in GiB; the oldest steps' are deleted "
            "(%(default)s)"
        ),
    ] = Field(default=20.0, gt=0)
    """A step of 512 rollouts with 8,000 sampled tokens each takes about 0.15 GB."""
    max_body_mb: Annotated[int, Flag("maximum size of a request body, in MB (%(default)s)")] = Field(default=512, ge=1)
    max_queued_jobs: Annotated[
        int, Flag("maximum number of train jobs of a project that wait; further ones get a 429 (%(default)s)")
    ] = Field(default=1000, ge=1)
    shares: Annotated[
        Mapping[str, Annotated[float, Field(gt=0)]],
        Flag(
            "weight of a project when jobs of several wait: with a=2 its jobs get twice the trainer's tokens of one without a "
            "weight; repeatable (1)",
            "PROJECT=WEIGHT",
            "share",
        ),
    ] = {}
    splicing: Annotated[
        bool,
        Flag(
            "sample from re-rendered conversations as they are, without the sampled tokens of earlier answers; reports "
            "count the differences",
            name="no-splicing",
        ),
    ] = True
    raw_special_tokens: Annotated[
        bool,
        Flag(
            "read control tokens that messages spell (such as <|im_end|>) as control tokens, as vLLM does; without it "
            "they are ordinary text (docs/agents.md)"
        ),
    ] = False
    ledger_max_gb: Annotated[float, Flag("maximum size of the ledger, in GiB (%(default)s)")] = Field(default=4.0, gt=0)
    ledger_max_age_days: Annotated[float, Flag("how long the ledger keeps records, in days (%(default)s)")] = Field(
        default=7.0, gt=0
    )
    trackers: Annotated[
        tuple[Annotated[str, AfterValidator(check_tracker_name)], ...],
        Flag(
            "report every step of every model to this tracker, and with otlp traces; repeatable; docs/tracking.md has the "
            "names, of which each needs its extra",
            "NAME",
            "tracker",
        ),
    ] = ()
    exit_with_parent: Annotated[bool, Flag("stop when the process that started the server ends")] = False
    legacy_without_key: Annotated[
        bool,
        Flag(
            "with API keys configured, callers without a key may use the routes of ART's older clients and of NVIDIA's "
            "plugin, which send no key (/register, /_train_model...), and only those; for a private network"
        ),
    ] = False

    @model_validator(mode="after")
    def _check_exact(self) -> Self:
        if self.exact and {self.dtype, self.trainer_dtype} - {"auto", "float32"}:
            raise ValueError("--exact computes in float32: leave out --dtype and --trainer-dtype")
        return self

    @model_validator(mode="after")
    def _check_all_origins(self) -> Self:
        if "*" in self.cors_origins and not self.api_keys:
            raise ValueError(
                "--cors-origin '*' without API keys lets every web page in a browser of this machine use the server: pass "
                "--api-key or --api-key-file, or name the origins"
            )
        return self

    @field_validator("chat_template")
    @classmethod
    def _check_template(cls, file: Path | None) -> Path | None:
        if file is None:
            return None
        try:
            file.read_text()
        except OSError as error:
            raise ValueError(f"{file} cannot be read ({error.strerror}): name a file with a Jinja template") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not a text file") from error
        return file.resolve()

    @property
    def takes_turns(self) -> bool:
        """Whether engine and trainer share devices and take turns."""
        return not self.train_devices and bool(self.engines) and self.ranks != 0

    def num_ranks(self, device: Device) -> int:
        """The number of processes that train a job together."""
        usual = len(self.train_devices) // self.gangs if device == "cuda" and self.trainer != "unsloth" else 1
        return max(1, usual) if self.ranks is None else self.ranks

    @property
    def takes_hosts(self) -> bool:
        """Whether other machines may offer their devices: Ray places them, or a key has the scope `host`."""
        return self.cluster is not None or any("host" in key.scopes for key in self.api_keys)

    def number_types(self, device: Device, *, has_delta_rule: bool = False) -> tuple[NumberType, NumberType]:
        """The number types of the engine and of the trainer's base weights. On a CPU the default is float32, which
        costs the engine nothing there and lets a model learn faster than bfloat16 (docs/precision.md); the engine computes
        gated delta layers there in bfloat16 only."""
        usual: NumberType = "bfloat16" if device == "cuda" and not self.exact else "float32"
        engine = usual if self.dtype == "auto" else self.dtype
        if self.dtype == "auto" and device == "cpu" and has_delta_rule:
            engine = "bfloat16"
        return engine, usual if self.trainer_dtype == "auto" else self.trainer_dtype

    def records_distributions(self, device: Device) -> bool:
        """Whether the engine records what each token was sampled from (`engine/vllm_process/kept_sets.py`)."""
        return device == "cpu" or self.record_distributions or self.exact

    def with_requested(self, requested: Mapping[str, str], max_positions: int) -> "ServerConfig":
        """These settings, with what a client requested (`OWN_ENGINE_ARGS`, `ENGINE_ARGS`) where the command line sets none."""
        engine_args = {**requested, **self.engine_args}
        asked = engine_args.pop("max_seq_length", None)
        records = engine_args.pop("record_distributions", None) == "true"
        length = self.max_seq_length
        if length is None and asked is not None:
            length = min(int(asked), max_positions)
        return self.model_copy(
            update={
                "max_seq_length": length,
                "record_distributions": self.record_distributions or records,
                "engine_args": engine_args,
            }
        )

    @property
    def server_dir(self) -> Path:
        """The folder of the server's own state, beside the projects. No project can have this name."""
        return self.path / ".server"

    @property
    def log_dir(self) -> Path:
        return self.path / "logs"
