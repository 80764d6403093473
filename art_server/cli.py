"""`art-server`: reads the command line, opens the ports, and runs the application."""

import argparse
import asyncio
import ipaddress
import logging
import os
import re
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from art_server import __version__
from art_server.children import collect_seldom, wake_in_batches
from art_server.commands import add_commands
from art_server.errors import ServerError
from art_server.installation import check_builds, installed_builds
from art_server.settings import ENGINE_ARGS, LORA_RANKS, ApiKey, ServerConfig

if TYPE_CHECKING:
    from art_server.api.keys import Keys

logger = logging.getLogger("art_server")

KEY_VARIABLE = "ART_API_KEY"
KEY_LINE = (
    "KEY [SCOPES [PROJECTS]] [name=NAME] [expires=TIME] [requests_per_minute=N] [concurrent=N]"
)
KEY_OPTIONS = {"name", "expires", "requests_per_minute", "concurrent"}
GRACE_SECONDS = 10
"""How long open answers may go on after SIGTERM."""
IDLE_CONNECTION_SECONDS = 600
"""Clients keep connections for reuse; closing one early makes their next request fail."""


class UsageError(Exception):
    """The command line cannot be carried out; the message says why and what to do."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the server until it is told to stop; exits with 2 and one sentence when it cannot start."""
    try:
        run(parse(arguments), lambda: parse(arguments).api_keys)
    except (UsageError, ServerError) as error:
        print(f"art-server: {error}", file=sys.stderr)
        sys.exit(2)


def art(arguments: Sequence[str] | None = None) -> None:
    """The command `art`, as ART's users know it."""
    parser = argparse.ArgumentParser(
        prog="art", description="Train LLM agents with reinforcement learning."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("run", help="run a server: the same as art-server", add_help=False)
    add_commands(commands)
    command, flags = parser.parse_known_args(arguments)
    if command.command == "run":
        return main(flags)
    command = parser.parse_args(arguments)
    try:
        run_command(command)
    except (UsageError, ServerError, OSError) as error:
        print(f"art: {error}", file=sys.stderr)
        sys.exit(2)


def run_command(command: argparse.Namespace) -> None:
    """Do what `art` was asked, other than to run a server."""
    try:
        from art_server import travel
    except ModuleNotFoundError as error:  # the server's extra
        raise missing_extra(error) from error
    travel.run_command(command)


def missing_extra(error: ModuleNotFoundError) -> UsageError:
    return UsageError(
        f"'{error.name}' is not installed: pip install 'agent-reinforcement-trainer[server]' (CPU) or "
        "'agent-reinforcement-trainer[gpu]'"
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="art-server",
        description="Serve a base model with trainable LoRA policies over an OpenAI-compatible API, and train them.",
    )
    add = parser.add_argument
    add("--version", action="version", version=__version__)
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen on; other than loopback needs an API key (%(default)s)",
    )
    add(
        "--port",
        type=int,
        default=7623,
        help="control port, which serves /v1 too; 0 takes a free one (%(default)s)",
    )
    add(
        "--inference-port",
        type=int,
        default=None,
        help="second port that serves /v1 only; 0 takes a free one (8000; taken, the server does without and says so, "
        "unless the flag was given)",
    )
    add(
        "--path",
        type=Path,
        default=Path(".art"),
        help="folder of checkpoints, history, jobs and logs (%(default)s)",
    )
    add(
        "--base-model",
        default=None,
        help="Hugging Face id, folder, 'art/tiny' or 'smollm2'; default: what the first registered model names, and "
        "after a restart the one that served last",
    )
    add(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"a key that may do everything; repeatable; also read from the environment variable {KEY_VARIABLE}",
    )
    add(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"a key a line: {KEY_LINE}; scopes are 'infer', 'train' or 'infer,train', times UTC (SECURITY.md); read again "
        "on SIGHUP",
    )
    add(
        "--tls-cert",
        type=Path,
        metavar="FILE",
        help="certificate (PEM, with its chain): both ports speak HTTPS; with --tls-key",
    )
    add("--tls-key", type=Path, metavar="FILE", help="the certificate's private key (PEM)")
    add(
        "--max-seq-length",
        type=int,
        help="tokens of prompt plus completion (the model's own; on a CPU at most 8192)",
    )
    add(
        "--max-lora-rank",
        type=int,
        choices=LORA_RANKS,
        default=16,
        help="highest LoRA rank that models may have (%(default)s)",
    )
    add(
        "--max-loras",
        type=int,
        default=4,
        help="adapters that one engine batch may mix, 2 or more (%(default)s)",
    )
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="number type of the engine (auto: float32 on a CPU, bfloat16 on CUDA)",
    )
    add(
        "--trainer",
        choices=("auto", "peft", "unsloth"),
        default="auto",
        help="auto is peft; unsloth needs CUDA and the extra `gpu` (docs/training.md)",
    )
    add(
        "--trainer-dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="number type of the base weights in the trainer (auto: float32 on a CPU, bfloat16 on CUDA)",
    )
    add(
        "--serve-devices",
        type=device_list,
        default=(),
        metavar="LIST",
        help="devices of the engine alone, as 0 or 0,1 or 0-3: GPUs, or a CPU's cores; with --train-devices sampling goes "
        "on while the trainer works (they share)",
    )
    add(
        "--train-devices",
        type=device_list,
        default=(),
        metavar="LIST",
        help="devices of the trainer alone: one GPU, or a CPU's cores",
    )
    add(
        "--handover",
        choices=("auto", "none", "kv_cache", "sleep"),
        default="auto",
        help="what the engine gives up for a step, on a GPU that the trainer uses too (auto: as little as fits)",
    )
    add(
        "--max-tokens-per-micro-batch",
        type=int,
        help="tokens that go through the trainer's model at a time (what fits the device)",
    )
    add(
        "--exact",
        action="store_true",
        help="float32 in engine and trainer; a step whose log-probabilities differ by more than 4e-5 on average, or 4e-4 at "
        "most, trains nothing",
    )
    add(
        "--gap-limit",
        type=float,
        metavar="MEAN",
        help="mean difference between the engine's and the trainer's log-probabilities above which a step trains nothing "
        "(four times the largest that was measured for their number types); 0: no limit",
    )
    add(
        "--kv-cache-gb",
        type=int,
        default=1,
        help="engine's KV cache on a CPU, in GiB (%(default)s)",
    )
    add(
        "--engine-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"passed on to vLLM; repeatable; one of: {', '.join(sorted(ENGINE_ARGS))}",
    )
    add(
        "--wait-limit",
        type=float,
        default=1800.0,
        metavar="SECONDS",
        help="how long inference waits for a training step or the engine before a 503 (%(default)s)",
    )
    add(
        "--keep-last",
        type=int,
        default=50,
        metavar="N",
        help="steps of each model that are kept, besides the best one; 0 keeps all (%(default)s)",
    )
    add("--max-body-mb", type=int, default=512, help="largest request body (%(default)s)")
    add(
        "--max-queued-jobs",
        type=int,
        default=1000,
        help="train jobs that may wait; further ones are refused with a 429 (%(default)s)",
    )
    add(
        "--no-splicing",
        action="store_true",
        help="sample from re-rendered conversations instead of their exact tokens; reports count the difference",
    )
    add(
        "--ledger-max-gb",
        type=float,
        default=4.0,
        help="size of the ledger of samples, in GiB (%(default)s)",
    )
    add(
        "--ledger-max-age-days",
        type=float,
        default=7.0,
        help="how long samples are kept (%(default)s)",
    )
    add(
        "--exit-with-parent",
        action="store_true",
        help="stop when the process that started the server ends",
    )
    add(
        "--legacy-without-key",
        action="store_true",
        help="with API keys configured, let callers without one use the routes of ART's older clients and of NVIDIA's "
        "plugin, which send none (/register, /_train_model...), and only those: for a private network",
    )
    return parser


def parse(arguments: Sequence[str] | None) -> ServerConfig:
    """The command line as settings.

    Raises:
        UsageError: flags that contradict each other or cannot be honoured.
    """
    flags = make_parser().parse_args(arguments)
    keys = read_keys(flags.api_key, flags.api_key_file, os.environ.get(KEY_VARIABLE))
    if not keys and not is_loopback(flags.host):
        raise UsageError(
            f"--host {flags.host} can be reached from other machines, so an API key is needed: pass --api-key, "
            f"--api-key-file or {KEY_VARIABLE}, or keep to --host 127.0.0.1"
        )
    settings: dict[str, Any] = {
        "host": flags.host,
        "port": flags.port,
        "inference_port": 8000 if flags.inference_port is None else flags.inference_port,
        "inference_port_required": flags.inference_port is not None,
        "path": flags.path,
        "base_model": flags.base_model,
        "api_keys": keys,
        "api_key_file": flags.api_key_file,
        "tls_cert": flags.tls_cert,
        "tls_key": flags.tls_key,
        "max_seq_length": flags.max_seq_length,
        "max_lora_rank": flags.max_lora_rank,
        "max_loras": flags.max_loras,
        "dtype": flags.dtype,
        "trainer": flags.trainer,
        "trainer_dtype": flags.trainer_dtype,
        "serve_devices": flags.serve_devices,
        "train_devices": flags.train_devices,
        "handover": flags.handover,
        "max_tokens_per_micro_batch": flags.max_tokens_per_micro_batch,
        "exact": flags.exact,
        "gap_limit": flags.gap_limit,
        "kv_cache_gb": flags.kv_cache_gb,
        "engine_args": read_engine_args(flags.engine_arg),
        "wait_limit_seconds": flags.wait_limit,
        "keep_last": flags.keep_last,
        "max_body_mb": flags.max_body_mb,
        "max_queued_jobs": flags.max_queued_jobs,
        "splicing": not flags.no_splicing,
        "ledger_max_gb": flags.ledger_max_gb,
        "ledger_max_age_days": flags.ledger_max_age_days,
        "exit_with_parent": flags.exit_with_parent,
        "legacy_without_key": flags.legacy_without_key,
    }
    try:
        return ServerConfig.model_validate(settings)
    except ValidationError as error:
        problem = error.errors()[0]
        if not problem["loc"]:  # of several flags
            raise UsageError(problem["msg"].removeprefix("Value error, ")) from error
        flag = "--" + str(problem["loc"][0]).replace("_", "-").removesuffix("-seconds")
        raise UsageError(f"{flag}: {problem['msg']}") from error


def read_keys(flags: Sequence[str], file: Path | None, variable: str | None) -> tuple[ApiKey, ...]:
    """All keys: from the flags and the variable with every scope, from the file as it says.

    Raises:
        UsageError: an unreadable file, or a line that is not a key.
    """
    keys = [ApiKey(key=key) for key in (*flags, *([variable] if variable else [])) if key]
    if any("::" in key.key for key in keys):
        raise UsageError("an API key must not contain '::': what follows it names a session")
    if file is None:
        return tuple(keys)
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise UsageError(f"--api-key-file {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--api-key-file {file} is no text file") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            keys.append(read_key(line))
        except ValueError as error:
            raise UsageError(
                f"--api-key-file {file}, line {number}: {error}; write {KEY_LINE}"
            ) from None
    return tuple(keys)


def read_key(line: str) -> ApiKey:
    """A line of the key file.

    Raises:
        ValueError: it is none; the message holds nothing of the line.
    """
    key, *fields = line.split()
    options = dict(field.split("=", 1) for field in fields if "=" in field)
    places = [field.split(",") for field in fields if "=" not in field]
    if "::" in key:
        raise ValueError("a key holds no '::', for what follows it names a session")
    if len(places) > 2 or len(places) + len(options) < len(fields):
        raise ValueError("a field too many")
    if not options.keys() <= KEY_OPTIONS:
        raise ValueError("an unknown field")
    lists = dict(zip(("scopes", "projects"), places, strict=False))
    try:
        return ApiKey.model_validate({"key": key, **lists, **options})
    except ValidationError as error:
        problem = error.errors()[0]
        raise ValueError(f"{problem['loc'][0]}: {problem['msg']}") from None


def read_engine_args(texts: Sequence[str]) -> dict[str, str]:
    """
    Raises:
        UsageError: not NAME=VALUE, or a name that is not on the list.
    """
    arguments: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not equals or name not in ENGINE_ARGS:
            raise UsageError(
                f"--engine-arg {text}: write NAME=VALUE with NAME one of {', '.join(sorted(ENGINE_ARGS))}"
            )
        arguments[name] = value.strip()
    return arguments


def device_list(text: str) -> tuple[int, ...]:
    """A list of numbers and ranges, as "0,2-4".

    Raises:
        ArgumentTypeError: it is none.
    """
    found: list[int] = []
    for part in text.split(","):
        numbers = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if numbers is None:
            raise argparse.ArgumentTypeError(f"'{text}' is no list of numbers such as 0,2-4")
        found += range(int(numbers[1]), int(numbers[2] or numbers[1]) + 1)
    return tuple(dict.fromkeys(found))


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def open_port(host: str, port: int, flag: str) -> socket.socket:
    """A listening socket.

    Raises:
        UsageError: the port is taken or may not be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind((host, port))
        opened.listen(2048)
    except OSError as error:
        opened.close()
        raise UsageError(
            f"{flag} {port} on {host}: {error.strerror}; choose another port, or 0 for a free one"
        ) from error
    opened.set_inheritable(False)
    return opened


def open_ports(config: ServerConfig) -> tuple[socket.socket, socket.socket | None]:
    """The control port, and the inference port unless it is taken and was not asked for."""
    control = open_port(config.host, config.port, "--port")
    if config.inference_port == config.port != 0:
        return control, None
    try:
        return control, open_port(config.host, config.inference_port, "--inference-port")
    except UsageError as error:
        if config.inference_port_required:
            control.close()
            raise
        logger.warning(
            "NO SECOND INFERENCE PORT: %s. Inference is served on the control port; clients that expect port %d "
            "will not find it",
            error,
            config.inference_port,
        )
        return control, None


def check_tls(config: ServerConfig) -> None:
    """
    Raises:
        UsageError: certificate and key cannot be read, or do not belong together.
    """
    if config.tls_cert is None or config.tls_key is None:
        return
    for flag, file in (("--tls-cert", config.tls_cert), ("--tls-key", config.tls_key)):
        try:
            file.read_bytes()
        except OSError as error:
            raise UsageError(f"{flag} {file} cannot be read: {error.strerror}") from error
    try:
        # The empty password keeps OpenSSL from asking on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            config.tls_cert, config.tls_key, password=""
        )
    except ssl.SSLError as error:
        raise UsageError(
            f"--tls-cert {config.tls_cert} and --tls-key {config.tls_key} are no PEM certificate and its key without a "
            f"password: {error.reason or error}"
        ) from error


def replace_keys(keys: "Keys", reread: Callable[[], Sequence[ApiKey]]) -> None:
    """Accept the keys as they are configured by now; those from before, where these cannot be read."""
    try:
        found = reread()
        if not found:
            raise UsageError("no key is left; to do without keys, start the server again")
    except UsageError as error:
        logger.error("SIGHUP: the API keys stay as they are: %s", error)
        return
    keys.replace(found)
    logger.info("SIGHUP: %d API keys are accepted", len(found))


def run(config: ServerConfig, reread_keys: Callable[[], Sequence[ApiKey]]) -> None:
    """Serve until a signal; at SIGHUP accept what `reread_keys` returns."""
    try:
        import uvicorn
        import uvloop

        from art_server.app import make_app
        from art_server.service import Service
        from art_server.store import files
    except ModuleNotFoundError as error:  # the extra that brings FastAPI and uvicorn
        raise missing_extra(error) from error
    check_builds(installed_builds())
    check_tls(config)
    try:
        files.keep_private(config.path)
    except OSError as error:
        raise UsageError(
            f"--path {config.path}: {error.filename} cannot be made private ({error.strerror}): it has to belong to the "
            "user who runs art-server"
        ) from error
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logger.info("art-server %s: %s", __version__, config)
    if config.legacy_without_key and config.api_keys:
        logger.warning("--legacy-without-key: whoever reaches this address can train every model")
    control, inference = open_ports(config)
    url = address(config, control)
    inference_url = address(config, inference) if inference is not None else url

    async def serve() -> None:
        service = Service(config)
        app = make_app(service, inference.getsockname()[1] if inference is not None else None)
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                ssl_certfile=config.tls_cert,
                ssl_keyfile=config.tls_key,
                timeout_graceful_shutdown=GRACE_SECONDS,
                timeout_keep_alive=IDLE_CONNECTION_SECONDS,
            )
        )
        if config.api_key_file is not None:
            asyncio.get_running_loop().add_signal_handler(
                signal.SIGHUP, replace_keys, app.state.keys, reread_keys
            )
        parent = os.getppid()
        address_file = config.server_dir / "address.json"
        content = {"pid": os.getpid(), "url": url, "inference_url": inference_url}
        files.write_json(address_file, content | {"started_at": time.time()})
        logger.info("listening on %s (inference also on %s/v1)", url, inference_url)
        sockets = [control] + ([inference] if inference is not None else [])
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve(sockets=sockets))
            while not serving.done():
                is_orphan = config.exit_with_parent and os.getppid() != parent
                if is_orphan or service.fatal is not None:
                    server.should_exit = True
                await asyncio.wait({serving}, timeout=1.0)
        if service.fatal is not None:
            raise service.fatal

    collect_seldom()
    wake_in_batches()
    uvloop.run(serve())


def address(config: ServerConfig, opened: socket.socket) -> str:
    scheme = "https" if config.tls_cert is not None else "http"
    shown = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{shown}:{opened.getsockname()[1]}"


if __name__ == "__main__":
    main()
