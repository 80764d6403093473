"""Why another start of vLLM would end as the last one did, read from what it wrote."""

import re

CAUSES = (
    (
        re.compile(r"^.*\b((?:ImportError|ModuleNotFoundError): .+)$", re.MULTILINE),
        "vLLM cannot be imported here, or not for this base model: {0}. Install what is missing, or the server anew (scripts/setup)",
    ),
    (
        re.compile(r"Model architectures? (\[.+?\]) .*not supported"),
        "vLLM does not serve the architecture {0}: take another base model",
    ),
    (
        re.compile(r"(\w+) does not support LoRA"),
        "vLLM serves {0} without adapters only: take another base model",
    ),
    (
        re.compile(r"(Free memory on device .+? GPU memory utilization \(.+?\))"),
        "another program uses the card: {0}. End it, or start the server with a lower --engine-arg gpu_memory_utilization=...",
    ),
    (
        re.compile(
            r"(To serve at least one request .+?\. )|(No available memory for the cache blocks)"
        ),
        "the KV cache has no room: {0}. Start the server with a shorter --max-seq-length, or take a smaller base model",
    ),
)
"""What stands in the log, and one sentence with its first group."""


TRACEBACK = "Traceback (most recent call last)"
"""Warnings before it name errors, too, that stopped nothing."""


def why_hopeless(log: str) -> str | None:
    """A sentence with cause and remedy; None where another try may go better."""
    log = log[max(0, log.find(TRACEBACK)) :] if TRACEBACK in log else ""
    for pattern, sentence in CAUSES:
        found = pattern.search(log)
        if found is not None:
            cause = next(group for group in found.groups() if group).strip()
            return sentence.format(cause[:300])
    return None
