"""Every error that a train call can end in, read from the server's sources, so that a new one is in the list by itself."""

import ast
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

from art_server import errors
from art_server.api.error_responses import HTTP_CODES, STATUS
from art_server.jobs.backoff import DIED, UNFORESEEN

ROOT = Path(__file__).parents[1]
SOURCES = [*(ROOT / "art_server").rglob("*.py")]


class Refusal(NamedTuple):
    """An answer that is no job; `code` is "error" where a proxy answered."""

    status: int
    code: str
    is_retryable: bool


def _calls() -> Iterator[tuple[str, ast.Call]]:
    """Each call in the sources with the name of what is called."""
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                called = node.func
                name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                yield name, node


def _texts(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def refusals() -> list[Refusal]:
    """Those that a server's routes raise, those of FastAPI, and each 4xx that a proxy may answer by itself."""
    refused = {Refusal(status, code, False) for status, code in HTTP_CODES.items()}
    refused |= {Refusal(500, "internal_error", False), Refusal(409, "records_missing", False)}
    refused |= {Refusal(status.value, "error", False) for status in HTTPStatus if 400 <= status < 500}
    for name, call in _calls():
        kind = getattr(errors, name, None)
        if not (isinstance(kind, type) and kind in STATUS):
            continue
        for keyword in call.keywords:
            if keyword.arg == "code":
                refused |= {Refusal(STATUS[kind], code, kind.retryable) for code in _texts(keyword.value)}
    return sorted(refused)


def job_errors() -> list[str]:
    """The codes with which a job can end: those of all that runs a job."""
    codes = {DIED, UNFORESEEN}
    for file in SOURCES:
        if {"api", "ledger"} & set(file.parts):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                for keyword in node.keywords:
                    if keyword.arg == "code":
                        codes |= set(_texts(keyword.value))
            elif isinstance(node, ast.Assign) and any("code" in ast.unparse(target) for target in node.targets):
                codes |= set(_texts(node.value))
    for name, call in _calls():
        if name == "TrainerError" and call.args:
            codes |= set(_texts(call.args[0]))
    return sorted(code for code in codes if code.isidentifier())
