"""Workflows: what a rollout runs. A workflow is a Python function or any program (`command`). `toolkit` has the workflows of
NVIDIA's toolkit.

The requests of a function are captured in this process, whichever HTTP client sends the requests. The requests of a program are
captured by the rollout's address. A function can pass this address to a service.
"""

import contextlib
import inspect
import os
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import art
from art.finetune import components
from art.finetune.programs import run_program, words_of
from art.finetune.rows import DatasetRow
from art.finetune.sections import LLM

WORKFLOW = "<workflow>"
"""The function name of requests outside of all functions."""

current_function: ContextVar[str] = ContextVar("current_function", default=WORKFLOW)


@contextlib.contextmanager
def function(name: str) -> Generator[None]:
    """Requests inside this block belong to the function `name`, which `finetuning.target_functions` can list."""
    token = current_function.set(name)
    try:
        yield
    finally:
        current_function.reset(token)


@dataclass(frozen=True, slots=True)
class Address:
    """A model that a workflow can use: an entry of `llms`."""

    base_url: str | None
    api_key: str | None = field(repr=False)
    model: str | None
    parameters: dict[str, Any]
    """The other fields of the section, such as `temperature`."""


@dataclass(frozen=True, slots=True)
class Call:
    """One rollout of one row."""

    row: DatasetRow
    rollout: art.Rollout
    seed: int
    llms: Mapping[str, Address]


Workflow: TypeAlias = Callable[[Call], Coroutine[Any, Any, Any]]
"""Runs a rollout and returns the output that is scored."""


def addresses(llms: Mapping[str, LLM], policy: str | None, model: art.TrainableModel) -> dict[str, Address]:
    """The models of a file, by name. The policy has the address, the key and the name of `model`."""
    models = {name: Address(llm.base_url, llm.api_key, llm.model_name, llm.fields()) for name, llm in llms.items()}
    parameters = models[policy].parameters if policy in models else {}
    key = model.inference_api_key or "default"
    models[policy or "policy"] = Address(model.inference_base_url, key, model.get_inference_name(), parameters)
    return models


of_user: dict[str, str] = {}
"""The user's own values of the variables that `openai_variables` names, for judges."""


def set_variables(variables: Mapping[str, str]) -> None:
    """Sets variables of this process in which an agent finds its model. The first call keeps the user's own values."""
    if not of_user:
        of_user.update({name: os.environ.get(name, "") for name in variables})
    os.environ.update(variables)


def environment_of_user() -> dict[str, str]:
    """The environment with the user's own values of the variables that a run sets."""
    return {name: value for name, value in (os.environ | of_user).items() if value or name not in of_user}


def openai_variables(base_url: str, api_key: str, model: str) -> dict[str, str]:
    """The environment variables in which an agent finds its model."""
    return {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "OPENAI_MODEL": model}


def unused_llm_fields(
    user_function: Callable[..., Any] | None, llms: Mapping[str, LLM], policy: str | None
) -> list[str]:
    """The fields of `llms` that a workflow does not see. A function with a parameter `llms` sees all fields. Any other workflow
    sees only the policy's address, key and model; the policy's sampling parameters are set in all requests."""
    if user_function is not None and "llms" in inspect.signature(user_function).parameters:
        return []
    others = [f"llms.{name}" for name in llms if name != policy]
    own = (llms[policy].model_extra or {}) if policy is not None else {}
    return [*others, *(f"llms.{policy}.{name}" for name in own)]


def of_function(user_function: Callable[..., Any]) -> Workflow:
    """The workflow of a function, async or plain."""

    async def play(call: Call) -> Any:
        arguments: dict[str, Any] = {
            "question": call.row.question,
            "messages": [dict(message) for message in call.row.messages] or [question_of(call.row)],
            "row": dict(call.row.columns),
            "rollout": call.rollout,
            "llms": call.llms,
            "seed": call.seed,
        }
        return await components.call(user_function, arguments)

    return play


def question_of(row: DatasetRow) -> dict[str, Any]:
    """The question as a message."""
    return {"role": "user", "content": row.question}


def of_command(command: str | list[str]) -> Workflow:
    """The workflow of a program. The program gets the row as JSON on standard input, and OPENAI_BASE_URL, OPENAI_API_KEY,
    OPENAI_MODEL and ART_SEED in its environment. The output is the text that the program prints. A program that takes too long is
    killed with all its children."""
    words = words_of(command)

    async def play(call: Call) -> str:
        rollout = call.rollout
        variables = openai_variables(rollout.base_url, rollout.api_key, rollout.model.get_inference_name())
        environment = os.environ | variables | {"ART_SEED": str(call.seed)}
        return await run_program(words, call.row.columns, environment)

    return play
