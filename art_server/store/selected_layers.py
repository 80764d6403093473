"""Which layers the configuration of a PEFT folder selects: lists of names, patterns, numbers of layers, exclusions.

Patterns are regular expressions of strangers, and matching one can take longer than the universe has. So they are matched in
a child process, which has limits on time and memory: this file is the child's script, and imports the standard library only.

Source: PEFT 0.21, `check_target_module_exists` and `match_target_against_key`.
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

TIMEOUT_SECONDS = 10
"""Unsloth's patterns take a millisecond for all layers of a model."""
MEMORY_BYTES = 1 << 30
MAX_CHARACTERS = 16_384
"""Longest pattern. Unsloth's longest, for models that read images, has about a thousand characters."""
FIELDS = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
ALL_LINEAR = "all-linear"


class BadPattern(ValueError):
    """The fields cannot be read as PEFT reads them; the message names the field."""


def not_selected(config: dict[str, Any], paths: Sequence[str], timeout_seconds: float = TIMEOUT_SECONDS) -> list[str]:
    """The layers, given by path, that the fields of a configuration do not select. Blocking.

    Raises:
        BadPattern: a field has another type, a pattern is invalid, or matching takes too long.
    """
    fields = {name: config.get(name) for name in FIELDS}
    _check(fields)
    # Without the environment's paths and packages, which the child does not need.
    command = [sys.executable, "-I", "-S", __file__]
    request = json.dumps([fields, list(paths)])
    try:
        done = subprocess.run(command, input=request, capture_output=True, text=True, timeout=timeout_seconds)
    except subprocess.TimeoutExpired as error:
        raise BadPattern(_unmatched(fields, f"matching takes longer than {timeout_seconds:g} s")) from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it needs too much memory"])[-1]
        raise BadPattern(_unmatched(fields, reason[:200]))
    return json.loads(done.stdout)


def _unmatched(fields: dict[str, Any], reason: str) -> str:
    named = [name for name in FIELDS if fields[name] and name != "layers_to_transform"]
    return f"{' and '.join(named)} cannot be matched ({reason}): write target_modules as a list of names of layers"


def _check(fields: dict[str, Any]) -> None:
    for name in ("target_modules", "exclude_modules", "layers_pattern"):
        value = fields[name]
        texts = [] if value is None else value
        if isinstance(value, str):
            texts = [value]
        if not isinstance(texts, list) or any(not isinstance(text, str) for text in texts):
            raise BadPattern(f"{name} is {value!r:.80}: it must be a pattern or a list of names")
        if sum(map(len, texts)) > MAX_CHARACTERS and (isinstance(value, str) or name == "layers_pattern"):
            raise BadPattern(
                f"{name} has more than {MAX_CHARACTERS} characters: write target_modules as a list of names"
            )
    numbers = fields["layers_to_transform"]
    listed = [] if numbers is None else numbers
    if not isinstance(listed, list):
        listed = [listed]
    if any(not isinstance(number, int) or isinstance(number, bool) for number in listed):
        raise BadPattern(f"layers_to_transform is {numbers!r:.80}: it must be a number or a list of numbers of layers")


def is_selected(fields: dict[str, Any], path: str) -> bool:
    """Whether PEFT gives a layer an adapter."""
    targets, excluded = fields["target_modules"], fields["exclude_modules"]
    if excluded and (re.fullmatch(excluded, path) if isinstance(excluded, str) else _ends_with(path, excluded)):
        return False
    if targets is None:  # no list and no pattern: all layers that have tensors
        return True
    if isinstance(targets, str):
        return targets == ALL_LINEAR or re.fullmatch(targets, path) is not None
    if path in targets:  # a whole path, for which numbers of layers do not count
        return True
    numbers = fields["layers_to_transform"]
    if not _ends_with(path, targets) or numbers is None or numbers == []:
        return _ends_with(path, targets)
    patterns = fields["layers_pattern"] or []
    layer = _number(path, [patterns] if isinstance(patterns, str) else patterns)
    return layer is not None and layer in (numbers if isinstance(numbers, list) else [numbers])


def _ends_with(path: str, names: Sequence[str]) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in names)


def _number(path: str, patterns: Sequence[str]) -> int | None:
    """The number of a layer, behind a name that one of the patterns matches; without patterns, behind any name:
    `model.layers.3.mlp.up_proj` -> 3."""
    rules = [rf"(?:^|.*?\.){pattern}\.(?P<number>\d+)\." for pattern in patterns] or [r".*?\.[^.]*\.(?P<number>\d+)\."]
    matches = (re.match(rule, path) for rule in rules)
    match = next((match for match in matches if match is not None), None)
    return None if match is None else int(match["number"])


def serve() -> None:
    """The child: reads fields and paths, writes the paths that are not selected."""
    import resource  # imported here, because Windows has none, where this module is only imported

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    fields, paths = json.load(sys.stdin)
    try:
        print(json.dumps([path for path in paths if not is_selected(fields, path)]))
    except (re.error, RecursionError, OverflowError, MemoryError, IndexError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    serve()
