"""Reads in vLLM's log why vLLM did not start, and whether another start would fail in the same way. Reads in
vLLM's answer to a refused request why it was refused."""

import json
import re
from typing import NamedTuple

OTHER_PROGRAM = (
    "another program uses the card: {0}. End it, or start the server with a lower --engine-arg "
    "gpu_memory_utilization=..."
)
"""This cause may pass: processes of a killed engine hold the card's memory for a moment."""
CAUSES = (
    (
        re.compile(r"^.*\b((?:ImportError|ModuleNotFoundError): .+)$", re.MULTILINE),
        "vLLM cannot be imported here, or not for this base model: {0}. Install the missing package, or reinstall the server (scripts/setup)",
    ),
    (
        re.compile(r"Model architectures? (\[.+?\]) .*not supported"),
        "vLLM does not serve the architecture {0}: use another base model",
    ),
    (
        re.compile(r"Unknown quantization method: (\w+)"),
        "vLLM cannot read weights that are quantised by {0}: for bitsandbytes install vllm-bnb-plugin, which the extra `gpu` "
        "contains; else use another base model",
    ),
    (
        re.compile(r"(\w+) does not support LoRA"),
        "vLLM serves {0} without adapters only: use another base model",
    ),
    (
        re.compile(r"(Free memory on device .+? GPU memory utilization \(.+?\))"),
        OTHER_PROGRAM,
    ),
    (
        re.compile(r"(To serve at least one request .+?\. )|(No available memory for the cache blocks)"),
        "the KV cache has no room: {0}. Start the server with a shorter --max-seq-length, or use a smaller base model",
    ),
)
"""Patterns in the log, each with a message; {0} is the pattern's first group that matched."""

ERROR = re.compile(
    r"^(?:\([^)]*\) )?(?:ERROR .*?)?\b(?:\w+\.)*((\w+(?:Error|Exception))(?:: (.+)|(?<=NotImplementedError)))$",
    re.MULTILINE,
)
"""The last line of an error's traceback, also behind what vLLM's processes and loggers write before each line."""
FOLLOWING = re.compile(
    "EngineDeadError|root cause|Engine core initialization failed|CancelledError|BrokenPipeError|"
    "Connection(Reset|Refused)Error"
)
"""Errors of vLLM's other processes, which follow from the first process's error."""
LASTING = frozenset(
    {
        *("ValueError", "ValidationError", "NotImplementedError", "AssertionError", "TypeError"),
        *("KeyError", "AttributeError", "IndexError"),
    }
)
"""Errors of a program that computes the same again with the same model."""
UNSUPPORTED = re.compile(r"\bunsupported\b|\bnot (supported|implemented)\b", re.IGNORECASE)

TRACEBACK = "Traceback (most recent call last)"
"""Only the log from here on is searched: warnings before it can name errors that did no harm."""


class Cause(NamedTuple):
    """Why vLLM did not start."""

    sentence: str
    """The cause and the remedy."""
    is_lasting: bool
    """Another start would fail in the same way."""


def find_cause(log: str) -> Cause | None:
    """The cause of a failed start, as far as vLLM's log names it."""
    log = log[max(0, log.find(TRACEBACK)) :] if TRACEBACK in log else ""
    for pattern, sentence in CAUSES:
        match = pattern.search(log)
        if match is not None:
            cause = next(group for group in match.groups() if group).strip()
            return Cause(sentence.format(cause[:300]), sentence is not OTHER_PROGRAM)
    return _find_error(log)


def _find_error(log: str) -> Cause | None:
    """The error that ended vLLM's process, in vLLM's own words."""
    for text, kind, message in ERROR.findall(log):
        if FOLLOWING.search(text):
            continue
        if kind in LASTING or UNSUPPORTED.search(message):
            reason = text[:300].rstrip(".")
            remedy = "use another base model, or leave out --engine-arg"
            return Cause(f"vLLM cannot run this base model here ({reason}): {remedy}", True)
        return Cause(f"vLLM ended with {text[:300]}", False)
    return None


MAX_REFUSAL = 500
"""Characters of a refusal: some repeat the whole conversation."""


def refusal_of(answer: str) -> str:
    """The sentence in vLLM's answer to a refused request: '{"error": {"message": "too long"}}' -> 'too long'."""
    try:
        message = json.loads(answer)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = answer
    return str(message)[:MAX_REFUSAL]
