"""Workflows: what a rollout runs. A Python function, or any program (`command`); `toolkit` has those of NVIDIA's toolkit.

The requests of a function are captured in this process, whichever HTTP client sends them. A program, or a service that a
function passes the rollout's address to, is captured by that address.
"""

import asyncio
import contextlib
import functools
import inspect
import json
import os
import shlex
import signal
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import art
from art.finetune import components
from art.finetune.limits import in_thread
from art.finetune.rows import Row
from art.finetune.sections import LLM, Component

WORKFLOW = "<workflow>"
"""The name that calls outside of all functions have."""
ERROR_CHARACTERS = 2000

current_function: ContextVar[str] = ContextVar("current_function", default=WORKFLOW)


@contextlib.contextmanager
def function(name: str) -> Generator[None]:
    """Requests inside this block are those of the function `name`, which `finetuning.target_functions` can list."""
    token = current_function.set(name)
    try:
        yield
    finally:
        current_function.reset(token)


@dataclass(frozen=True, slots=True)
class Address:
    """A model that a workflow can use: one of `llms`."""

    base_url: str | None
    api_key: str | None = field(repr=False)
    model: str | None
    parameters: dict[str, Any]
    """The other fields of the section, such as `temperature`."""


@dataclass(frozen=True, slots=True)
class Call:
    """One rollout of one row."""

    row: Row
    rollout: art.Rollout
    seed: int
    llms: Mapping[str, Address]


Workflow: TypeAlias = Callable[[Call], Coroutine[Any, Any, Any]]
"""Runs a rollout and returns the output that is scored."""


def addresses(llms: Mapping[str, LLM], policy: str | None, model: art.TrainableModel) -> dict[str, Address]:
    """The models of a file. The policy's has the address, the key and the name of the given model."""
    found = {name: Address(llm.base_url, llm.api_key, llm.model_name, llm.fields()) for name, llm in llms.items()}
    parameters = found[policy].parameters if policy in found else {}
    key = model.inference_api_key or "default"
    found[policy or "policy"] = Address(model.inference_base_url, key, model.get_inference_name(), parameters)
    return found


def openai_variables(base_url: str, api_key: str, model: str) -> dict[str, str]:
    """The environment variables in which an agent finds its model."""
    return {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "OPENAI_MODEL": model}


def make_workflow(section: Component, model: art.TrainableModel) -> Workflow:
    """The workflow of a file, for a registered model. The variables are set before its module is imported.

    Raises:
        ValueError: its module cannot be imported.
    """
    if section.type == "command":
        return _of_command(section.fields()["command"])
    key = model.inference_api_key or "default"
    os.environ.update(openai_variables(str(model.inference_base_url), key, model.get_inference_name()))
    return _of_function(components.load("workflow", section.type))


def unused_llm_fields(section: Component, llms: Mapping[str, LLM], policy: str | None) -> list[str]:
    """What a workflow does not see of `llms`: all but the policy's address, key and model, unless it is a function that takes
    `llms`."""
    if section.type != "command" and "llms" in inspect.signature(components.load("workflow", section.type)).parameters:
        return []
    others = [f"llms.{name}" for name in llms if name != policy]
    own = llms[policy].fields() if policy is not None else {}
    return [*others, *(f"llms.{policy}.{name}" for name in own)]


def _of_function(given: Callable[..., Any]) -> Workflow:
    """A function, async or plain, gets what its parameters name. A single parameter of another name gets the question. Plain
    functions run in threads."""
    is_async = components.is_async(given)
    parameters = inspect.signature(given).parameters.values()

    async def play(call: Call) -> Any:
        known: dict[str, Any] = {
            "question": call.row.question,
            "row": dict(call.row.columns),
            "rollout": call.rollout,
            "llms": call.llms,
            "seed": call.seed,
        }
        arguments: dict[str, Any] = {}
        for each in parameters:
            is_required = each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
            if each.name in known or is_required:
                arguments[each.name] = known.get(each.name, call.row.question)
        if is_async:
            return await given(**arguments)
        output = await in_thread(functools.partial(given, **arguments))
        return await output if inspect.isawaitable(output) else output

    return play


def _of_command(command: str | list[str]) -> Workflow:
    """A program gets the row as JSON on standard input, and in its environment OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL
    and ART_SEED. The output is what it prints. If it takes too long, it ends with all its children."""
    arguments = shlex.split(command) if isinstance(command, str) else command

    async def play(call: Call) -> str:
        rollout = call.rollout
        variables = openai_variables(rollout.base_url, rollout.api_key, rollout.model.get_inference_name())
        starting = asyncio.create_task(
            asyncio.create_subprocess_exec(
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=os.environ | variables | {"ART_SEED": str(call.seed)},
                start_new_session=True,
            )
        )
        try:
            process = await asyncio.shield(starting)
            given = json.dumps(call.row.columns, ensure_ascii=False, default=str).encode()
            output, errors = await process.communicate(given)
        finally:  # also if this call was cancelled while the program started
            process = await starting
            with contextlib.suppress(ProcessLookupError):  # all of them have ended
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode:
            end = errors.decode(errors="replace").strip()[-ERROR_CHARACTERS:]
            raise RuntimeError(f"{arguments[0]} ended with exit code {process.returncode}: {end}")
        return output.decode(errors="replace").strip()

    return play
