"""Secrets: the names of fields that hold a secret, and the forms of secrets in texts. No file and no message of the harness has a
secret."""

import re
from typing import Any, cast

MASK = "***"
NAME = re.compile(
    r"""
    .*(api|access|account|secret|private|auth|signing|encryption|master|service|license|subscription)_?key
    | (\w+_)?(openai|anthropic|azure|aws|nvidia|hf|huggingface|wandb|google|gemini|mistral|cohere|groq|tavily)_?key
    | .*(password|passwd|passphrase|secret|credential|authorization|cookie).*
    | auth | pwd | bearer
    | (\w+_)?(access|api|auth|bearer|hf|github|gitlab|slack|session|refresh|jwt|oauth|client|bot|security)_?token | token
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""Names of fields, with "_" for "-". max_tokens, pad_token and question_key are not among them."""
USER = re.compile(r"(?<=://)[^/\s@]*@|(?<![\w/])[^\s/:@'\"]+:[^\s/:@'\"]+@(?=\w)")
"""User and password of a URL, also of a URL without its scheme."""
PARAMETER = re.compile(
    r"(?P<before>--?(?P<flag>\w[\w-]*)\s+|(?P<name>[\w-]+)(?:=|['\"]:\s*['\"]?)|(?P<header>\w+-[\w-]+):\s*)[^\s&;'\",]*[^\s&;'\",)\]}]"
)
"""A flag, a variable, a parameter of a URL, a field of JSON or a header, with its value."""
VALUE = re.compile(
    r"\b((?i:bearer|basic)\s+[\w+/.=~-]{6,}|sk-[\w-]{4,}|hf_\w{8,}|nvapi-[\w-]{8,}|gh[pousr]_\w{16,}|xox[abps]-[\w-]{8,}"
    r"|AKIA\w{12,}|AIza[\w-]{20,}|eyJ[\w-]{8,}\.[\w-]+\.[\w-]+)"
)
"""Keys of well-known services, and the values of headers."""


def is_secret(name: str) -> bool:
    """Whether a field of this name holds a secret."""
    return NAME.fullmatch(name.replace("-", "_")) is not None


def masked(text: str) -> str:
    """The text with its secrets masked: `'--api-key abc' -> '--api-key ***'`."""

    def of_parameter(match: re.Match[str]) -> str:
        name = match["flag"] or match["name"] or match["header"]
        return f"{match['before']}{MASK}" if is_secret(name) else match[0]

    return PARAMETER.sub(of_parameter, VALUE.sub(MASK, USER.sub(f"{MASK}@", text)))


def without_secrets(value: Any) -> Any:
    """A JSON value without the fields that hold secrets, and without secrets in other texts. Texts of several lines, such as
    prompts, stay as they are."""
    if isinstance(value, list):
        return [without_secrets(entry) for entry in cast("list[Any]", value)]
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value).items()
        return {name: without_secrets(field) for name, field in fields if not is_secret(name)}
    if not isinstance(value, str):
        return value
    return str(value if "\n" in value else masked(USER.sub("", value)))
