"""vLLM's command line and environment, and what else a process of vLLM needs before it starts."""

import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from art_server.engine.device.plan import MemoryPlan
from art_server.errors import InvalidInput
from art_server.process.place import Command, Endpoint
from art_server.process.receiver import Receiver
from art_server.settings import ENGINE_ARGS, Device, ServerConfig
from art_server.shared.switches import (
    DISTRIBUTIONS_SWITCH,
    EXPERTS_SWITCH,
    ONE_THREAD_SWITCH,
    PORT_SWITCH,
    RAW_SWITCH,
    SECRET_SWITCH,
    SWITCH,
)
from art_server.shared.work_counters import FILE_VARIABLE, make_file
from art_server.store import files
from art_server.store.base_facts import Facts, Parsers
from art_server.store.base_models import BaseModel, has_other_format, weight_bytes

SOCKET_NAME, RECORDS_NAME, WORK_NAME = "engine.sock", "records.sock", "work"
"""Names in the engine's private folder: vLLM's HTTP socket, the socket for records, and the file of the work counters."""

CPU_MAX_SEQ_LENGTH = 8192
"""Default limit of the context on a CPU: a longer one takes memory for a cache that a CPU is too slow to fill."""

CPU_BLOCK_SIZE = 32
"""Tokens in a block of the KV cache, the fewest that vLLM's fast kernels support. Only whole blocks are shared: with
vLLM's default of 128, each rollout computed its prompt again if the prompt was shorter than a block."""

LATENT_BACKEND = "CPU_MLA"
"""vLLM's kernels for latent attention on any CPU and in both number types; vLLM sets their block size itself. The kernels that
vLLM prefers on a CPU with AMX take bfloat16 only, and a CPU serves float32."""

FEW_CORES, LARGE_BYTES = 4, 100_000_000
"""vLLM leaves one core to its other processes. With at most this number of cores and a model above this size, the model gets
all cores. Two cores, 96 rollouts: SmolLM2 takes 10.3 s on one core, 6.4 s on both; art/tiny 0.9 and 1.1 s."""

MIN_CPU_LORAS = 16
"""Adapters that vLLM keeps in main memory, so that a return to a recent step reads no file."""

SWITCHES = (
    "enable-lora",
    "language-model-only",
    "disable-uvicorn-access-log",
)
"""Only language: an image in a message could name an address, which vLLM would fetch."""


@dataclass(frozen=True, kw_only=True)
class EngineProgram:
    """vLLM with a base model, as a place starts it (`process/place.py`)."""

    config: ServerConfig
    base: BaseModel
    device: Device
    run_dir: Path
    """The engine's private folder, on the machine that runs vLLM."""
    receiver: Receiver
    plan: MemoryPlan | None = None
    """A GPU's memory plan."""
    port: int | None = None
    """The file descriptor of a bound port. None: vLLM listens on a socket in `run_dir`."""
    secret: str = ""
    """The header value that each request to the port must have."""

    async def prepare(self) -> Command:
        """Listens for vLLM's records, writes the file of its work counters, and returns vLLM's command."""
        socket_path, work_file = self.run_dir / SOCKET_NAME, self.run_dir / WORK_NAME
        # A killed vLLM leaves its socket, and bind(2) fails at a path that exists.
        socket_path.unlink(missing_ok=True)
        make_file(work_file)
        await self.receiver.listen(self.run_dir / RECORDS_NAME)
        # In a thread: the first command for a model reads the model's files.
        arguments = await asyncio.to_thread(
            engine_command, self.config, self.base, self.device, self.run_dir, self.plan
        )
        environment = engine_environment(self.config, self.base, self.device, os.environ)
        environment[FILE_VARIABLE] = str(work_file)
        if self.port is not None:
            environment |= {PORT_SWITCH: str(self.port), SECRET_SWITCH: self.secret}
        return Command(
            arguments=arguments,
            environment=environment,
            inherited=() if self.port is None else (self.port,),
            work_file=work_file,
            endpoint=Endpoint("http://engine", socket_path),
        )


def make_run_dir(owner: Path, name: str) -> Path:
    """Makes a private folder for the sockets of an engine, in the system's temporary folder because a socket's path has at most
    107 characters (unix(7)). A note in `owner`, the folder of the server or host, names the private folder."""
    folder = Path(tempfile.mkdtemp(prefix="art-"))
    note = owner / ("run_dir" if name == "engine" else f"run_dir-{name}")
    files.write_file(note, f"{folder}\n{owner.resolve()}".encode())
    return folder


def remove_run_dirs(owner: Path) -> None:
    """Removes the private folders that an earlier, killed server or host left, but not if `owner` is a copy of another one's
    folder."""
    for note in owner.glob("run_dir*"):
        last, _, noted_owner = note.read_text().partition("\n")
        if noted_owner == str(owner.resolve()):
            shutil.rmtree(last, ignore_errors=True)
        note.unlink()


def seq_length(config: ServerConfig, base: BaseModel, device: Device) -> int | None:
    """The engine's context length: tokens of prompt plus completion. None (CUDA) means as many as the KV cache holds.

    Raises:
        InvalidInput: `--max-seq-length` is above the model's limit.
    """
    check_seq_length(config, base)
    if config.max_seq_length is None and device == "cpu":
        return min(base.facts.max_positions, CPU_MAX_SEQ_LENGTH)
    return config.max_seq_length


def check_seq_length(config: ServerConfig, base: BaseModel) -> None:
    """Checks that the model has as many positions as `--max-seq-length`.

    Raises:
        InvalidInput: the model has fewer.
    """
    longest = base.facts.max_positions
    if config.max_seq_length is not None and config.max_seq_length > longest:
        raise InvalidInput(
            f"max_seq_length {config.max_seq_length} is above the {longest} positions of base model '{base.name}': "
            f"start the server with --max-seq-length {longest} or less",
            code="context_too_long",
            param="max_seq_length",
        )


def notes_on_device(device: Device, facts: Facts) -> list[str]:
    """How an engine on this device computes a model differently than usual, a sentence for each difference."""
    notes: list[str] = []
    if device == "cpu" and facts.has_delta_rule:
        notes.append("it computes in bfloat16, as gated delta layers have to on a CPU")
    if device == "cpu" and facts.has_latent_attention:
        notes.append(f"its attention is {LATENT_BACKEND}, vLLM's only one for latent attention in float32 on a CPU")
    return notes


def attention_on_cpu(facts: Facts) -> dict[str, str]:
    """vLLM's options for the attention of a model on a CPU."""
    if facts.has_latent_attention:
        return {"attention-backend": LATENT_BACKEND}
    return {"block-size": str(CPU_BLOCK_SIZE)}


def engine_command(
    config: ServerConfig, base: BaseModel, device: Device, run_dir: Path, plan: MemoryPlan | None = None
) -> list[str]:
    """The command line of the engine's process, whose sockets are in `run_dir`. `plan` is a GPU's memory plan."""
    facts = base.facts
    arguments: dict[str, str] = {
        "model": str(base.path),
        "served-model-name": base.name,
        "uds": str(run_dir / SOCKET_NAME),
        "max-model-len": str(seq_length(config, base, device) or "auto"),
        "max-lora-rank": str(config.max_lora_rank),
        "max-loras": str(config.max_loras),
        # vLLM refuses a number below max-loras.
        "max-cpu-loras": str(max(MIN_CPU_LORAS, config.max_loras)),
        "dtype": config.number_types(device, has_delta_rule=facts.has_delta_rule)[0],
        # By default vLLM takes a request's missing parameters, such as top_p, from the model's generation_config.json.
        "generation-config": "vllm",
    }
    if has_other_format(base.path):
        arguments |= {"config-format": "hf", "load-format": "safetensors", "tokenizer-mode": "hf"}
    if facts.overrides:
        arguments["hf-overrides"] = json.dumps(facts.overrides)
    if base.template is not None:
        arguments["chat-template"] = str(base.template)
    arguments |= parser_arguments(facts.parsers)
    switches = [*SWITCHES]
    if device == "cpu":
        switches.append("enforce-eager")
        arguments |= attention_on_cpu(facts)
    if device == "cuda" and len(config.serve_devices) > 1:
        arguments["tensor-parallel-size"] = str(len(config.serve_devices))
    if plan is not None:
        arguments["gpu-memory-utilization"] = str(plan.utilization)
        if plan.handover != "none":
            switches.append("enable-sleep-mode")
    apply_requested(config.engine_args, arguments, switches)
    # With the parser alone vLLM refuses a request whose tool_choice is "auto" (0.32, renderers/online_renderer.py).
    if "tool-call-parser" in arguments:
        switches.append("enable-auto-tool-choice")
    flags: list[str] = []
    for key, value in arguments.items():
        flags += [f"--{key}", value]
    # By default vLLM applies adapters to the experts, too, which ours do not change.
    if facts.is_mixture:
        flags += ["--lora-target-modules", *facts.layers.last_names]
    return [
        sys.executable,
        "-m",
        "art_server.engine.vllm_process.child",
        str(run_dir / RECORDS_NAME),
        *flags,
        *(f"--{switch}" for switch in switches),
    ]


def parser_arguments(parsers: Parsers) -> dict[str, str]:
    """vLLM's options for the parsers of a model's answers."""
    arguments: dict[str, str] = {}
    if parsers.tool is not None:
        arguments["tool-call-parser"] = parsers.tool
    if parsers.reasoning is not None:
        arguments["reasoning-parser"] = parsers.reasoning
    if parsers.thinks is not None:
        arguments["default-chat-template-kwargs"] = json.dumps({"enable_thinking": parsers.thinks})
    return arguments


def apply_requested(requested: Mapping[str, str], arguments: dict[str, str], switches: list[str]) -> None:
    """Adds the requested engine arguments, which replace ours."""
    for key, value in requested.items():
        assert key in ENGINE_ARGS, "checked on the command line"
        name = key.replace("_", "-")
        if value.lower() not in ("true", "false"):
            arguments[name] = value
            continue
        if name in switches:
            switches.remove(name)
        switches.append(name if value.lower() == "true" else f"no-{name}")


def engine_environment(
    config: ServerConfig, base: BaseModel, device: Device, inherited: Mapping[str, str]
) -> dict[str, str]:
    """The engine's environment: the server's without its API key, plus the variables of vLLM and of our plugin."""
    environment = {key: value for key, value in inherited.items() if key != "ART_API_KEY"}
    environment.update(
        VLLM_ALLOW_RUNTIME_LORA_UPDATING="True",
        # vLLM has its routes for sleep, pause and the prefix cache in this mode only.
        VLLM_SERVER_DEV_MODE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        # Longer than our HTTP client keeps idle connections: no request gets a connection that vLLM has just closed.
        VLLM_HTTP_TIMEOUT_KEEP_ALIVE="60",
    )
    environment[SWITCH] = device
    if config.records_distributions(device):
        environment[DISTRIBUTIONS_SWITCH] = "1"
    if config.raw_special_tokens:
        environment[RAW_SWITCH] = "1"
    if device == "cpu":
        _set_cpu_variables(environment, config, base)
    elif config.records_distributions(device):
        # `kept_sets.py` works with this model runner and this sampler only.
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    return environment


def _set_cpu_variables(environment: dict[str, str], config: ServerConfig, base: BaseModel) -> None:
    # With dynamo the first request with log-probabilities compiles for 8-15 s; a CPU gains nothing from it.
    environment["TORCHDYNAMO_DISABLE"] = "1"
    # glibc's own limits give the memory of large logits back to the system after each step: 7% of SmolLM2's time.
    environment.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**33))
    environment.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**25))  # the largest that glibc accepts
    if base.facts.is_mixture:
        environment[EXPERTS_SWITCH] = "1"
    environment["VLLM_CPU_KVCACHE_SPACE"] = str(config.kv_cache_gb)
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    takes_all = weight_bytes(base.path) > LARGE_BYTES and len(cores) <= FEW_CORES
    # With several ranks vLLM wants a list of cores for each of them.
    if "tensor_parallel_size" not in config.engine_args and (takes_all or config.serve_devices):
        bound = ",".join(map(str, config.serve_devices or cores))
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", bound)
    # With "auto" vLLM leaves one core to its other processes: on two cores one thread computes.
    bound = environment.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    if bound.isdecimal() or (bound == "auto" and len(cores) <= 2):
        environment[ONE_THREAD_SWITCH] = "1"
