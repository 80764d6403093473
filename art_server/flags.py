"""The command line of `art-server`: built from the settings, and parsed into them."""

import argparse
import ipaddress
import math
import os
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from art_server import __version__
from art_server.errors import UsageError
from art_server.parser import Parser
from art_server.settings import ENGINE_ARGS, KEY_LINE, KEY_VARIABLE, ApiKey, Flag, ServerConfig

KEY_OPTIONS = {"name", "expires"}
GROUPS = {
    "addresses and keys": (
        *("host", "port", "inference_port", "api_keys", "api_key_file", "legacy_without_key", "cors_origins"),
    ),
    "base model": ("base_model", "chat_template", "max_seq_length", "max_lora_rank", "max_loras"),
    "number types and exactness": (
        *("dtype", "trainer_dtype", "exact", "gap_limit", "record_distributions"),
        *("splicing", "raw_special_tokens"),
    ),
    "devices": (
        *("engines", "ranks", "gangs", "serve_devices", "train_devices", "shard", "handover", "cluster"),
        *("trainer", "max_tokens_per_micro_batch", "kv_cache_gb", "engine_args"),
    ),
    "files": ("path", "keep_last", "rollouts_max_gb", "ledger_max_gb", "ledger_max_age_days", "trackers"),
    "requests and jobs": ("wait_limit_seconds", "max_body_mb", "max_queued_jobs", "shares", "exit_with_parent"),
}
"""The settings in the order of `--help`, by title."""

OTHER_FLAGS = {
    "--max-model-len": "--max-seq-length",
    "--model": "--base-model",
    **{f"--{name.replace('_', '-')}": f"--engine-arg {name}=VALUE" for name in ENGINE_ARGS},
}
"""Flags of vLLM, with what they are here."""


def flag_of(field: str) -> Flag:
    """How the command line shows a setting, with the flag's name filled in."""
    (flag,) = (entry for entry in ServerConfig.model_fields[field].metadata if isinstance(entry, Flag))
    return flag._replace(name=flag.name or field.replace("_", "-"))


def make_parser() -> Parser:
    parser = Parser(
        prog="art-server",
        description="Serve a base model with trainable LoRA policies over an OpenAI-compatible API,\nand train them.",
        epilog="`art-server host` offers another machine's devices to a server:\n`art-server host --help`",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.other_words = OTHER_FLAGS
    parser.add_argument("--version", action="version", version=__version__)
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            field, flag = ServerConfig.model_fields[name], flag_of(name)
            group.add_argument(
                f"--{flag.name}",
                dest=name,
                help=flag.help,
                **_kind(field.annotation, field.default, flag),
            )
    return parser


def _kind(annotation: Any, default: Any, flag: Flag) -> dict[str, Any]:
    """The arguments of `add_argument` that follow from a setting's type."""
    if isinstance(annotation, types.UnionType):
        annotation = annotation.__args__[0]  # X | None
    if annotation is bool:
        return {"action": "store_false" if default else "store_true"}
    origin = typing.get_origin(annotation)
    if origin is Literal:
        choices = typing.get_args(annotation)
        return {"choices": choices, "type": type(choices[0]), "default": default}
    kind: dict[str, Any] = {"metavar": flag.metavar, "default": default}
    if origin is None:
        return kind | {"type": annotation}
    if typing.get_args(annotation)[0] is int:
        return kind | {"type": device_list}
    return kind | {"action": "append", "default": []}


def settings_table() -> str:
    """All flags as a Markdown table."""
    lines = ["| Flag | Default | |", "|---|---|---|"]
    for name, field in ServerConfig.model_fields.items():
        flag = flag_of(name)
        is_shown = isinstance(field.default, int | float | str | Path)
        default = f"`{field.default}`" if is_shown and not isinstance(field.default, bool) else ""
        text = flag.help.removesuffix(" (%(default)s)").replace("|", "\\|").replace("[", "\\[")
        lines.append(f"| `--{flag.name}` | {default} | {text} |")
    return "\n".join(lines) + "\n"


def parse(arguments: Sequence[str] | None) -> ServerConfig:
    """The command line as settings.

    Raises:
        UsageError: a flag is invalid, or flags contradict each other.
    """
    parser = make_parser()
    flags, words = parser.parse_known_args(arguments)
    if words:
        parser.error(f"'{words[0]}' is no flag: `art-server --base-model NAME` serves a base model")
    settings = vars(flags)
    host, variable = settings["host"], os.environ.get(KEY_VARIABLE)
    settings["api_keys"] = read_keys(settings["api_keys"], settings["api_key_file"], variable)
    if not settings["api_keys"] and not is_loopback(host):
        raise UsageError(
            f"--host {host} can be reached from other machines, so an API key is needed: pass --api-key, "
            f"--api-key-file or {KEY_VARIABLE}, or use --host 127.0.0.1"
        )
    settings["engine_args"] = parse_engine_args(settings["engine_args"])
    settings["shares"] = parse_shares(settings["shares"])
    try:
        return ServerConfig.model_validate(settings)
    except ValidationError as error:
        problem = error.errors()[0]
        if not problem["loc"]:  # the error concerns several flags
            raise UsageError(problem["msg"].removeprefix("Value error, ")) from error
        reason = problem["msg"].removeprefix("Value error, ")
        raise UsageError(f"--{flag_of(str(problem['loc'][0])).name}: {reason}") from error


def read_keys(flags: Sequence[str], file: Path | None, variable: str | None) -> tuple[ApiKey, ...]:
    """All keys. Keys of the flags and the variable have every scope; the file states the scopes of its keys.

    Raises:
        UsageError: a file that cannot be read, a line that is not a key, or a key with '::'.
    """
    secrets = [*flags, variable or ""]
    keys = [ApiKey(key=secret) for secret in secrets if secret]
    if any("::" in key.key for key in keys):
        raise UsageError("an API key must not contain '::', which begins a session's name")
    if file is None:
        return tuple(keys)
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise UsageError(
            f"--api-key-file {file} cannot be read ({error.strerror}): name a file with lines of the form {KEY_LINE}"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--api-key-file {file} is not a text file") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            keys.append(read_key(line))
        except ValueError as error:
            raise UsageError(f"--api-key-file {file}, line {number}: {error}; write {KEY_LINE}") from None
    return tuple(keys)


def read_key(line: str) -> ApiKey:
    """The key in a line of the key file.

    Raises:
        ValueError: the line is not a key. The message contains no part of the line.
    """
    key, *fields = line.split()
    options = dict(field.split("=", 1) for field in fields if "=" in field)
    positional = [field.split(",") for field in fields if "=" not in field]
    if "::" in key:
        raise ValueError("a key must not contain '::', which begins a session's name")
    if len(positional) > 2 or len(positional) + len(options) < len(fields):
        raise ValueError("too many fields, or one twice")
    if not options.keys() <= KEY_OPTIONS:
        raise ValueError("an unknown field")
    lists = dict(zip(("scopes", "projects"), positional, strict=False))
    try:
        return ApiKey.model_validate({"key": key, **lists, **options})
    except ValidationError as error:
        problem = error.errors()[0]
        # pydantic's error shows its input, which has the key.
        raise ValueError(f"{problem['loc'][0]}: {problem['msg']}") from None


def parse_engine_args(texts: Sequence[str]) -> dict[str, str]:
    """The engine arguments in the values of `--engine-arg`, by name.

    Raises:
        UsageError: not NAME=VALUE, or a name that is not in `ENGINE_ARGS`.
    """
    arguments: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not equals or name not in ENGINE_ARGS:
            raise UsageError(f"--engine-arg {text}: write NAME=VALUE with NAME one of {', '.join(sorted(ENGINE_ARGS))}")
        arguments[name] = value.strip()
    return arguments


def parse_shares(texts: Sequence[str]) -> dict[str, float]:
    """The weights in the values of `--share`, by project.

    Raises:
        UsageError: not PROJECT=WEIGHT with a number above zero.
    """
    shares: dict[str, float] = {}
    for text in texts:
        project, equals, value = text.partition("=")
        try:
            weight = float(value)
        except ValueError:
            weight = math.nan
        if not (equals and project and 0 < weight < math.inf):
            raise UsageError(f"--share {text}: write PROJECT=WEIGHT with a number above 0, such as team-a=2")
        shares[project] = weight
    return shares


def device_list(text: str) -> tuple[int, ...]:
    """The numbers in a list of numbers and ranges such as "0,2-4".

    Raises:
        ArgumentTypeError: the text is not such a list.
    """
    devices: list[int] = []
    for part in text.split(","):
        numbers = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if numbers is None:
            raise argparse.ArgumentTypeError(f"'{text}' is not a list of numbers such as 0,2-4")
        devices += range(int(numbers[1]), int(numbers[2] or numbers[1]) + 1)
    return tuple(dict.fromkeys(devices))


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
