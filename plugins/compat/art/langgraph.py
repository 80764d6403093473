"""LangChain and LangGraph agents, with the names that programs written for ART use.

    async def rollout(model, scenario):
        agent = create_agent(init_chat_model(model.get_inference_name()), tools)
        ...
        return art.Trajectory(reward=score(...))

    group = art.TrajectoryGroup(wrap_rollout(model, rollout)(model, scenario) for _ in range(8))

`wrap_rollout` is `art.rollout` around a function. Needs `langchain-openai`.
"""

import functools
import importlib
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, ParamSpec

from art.compat.aliases import alias
from art.model import TrainableModel
from art.sessions import Rollout, rollout
from art.trajectories import Trajectory

P = ParamSpec("P")

_current: ContextVar[Rollout | None] = ContextVar("_current", default=None)


def wrap_rollout(model: TrainableModel, fn: Callable[P, Awaitable[Trajectory]]) -> Callable[P, Awaitable[Trajectory]]:
    """The function with its agent's conversations in the trajectory that it returns.

    Chat models that `init_chat_model` makes inside it belong to the rollout. If the function returns a trajectory with
    messages of its own, these stay.
    """

    @functools.wraps(fn)
    async def wrapped(*args: P.args, **kwargs: P.kwargs) -> Trajectory:
        async with rollout(model) as opened:
            token = _current.set(opened)
            try:
                made = await fn(*args, **kwargs)
            finally:
                _current.reset(token)
            captured = await opened.trajectory(reward=made.reward)
        if not made.messages_and_choices:
            made.messages_and_choices, made.tools = captured.messages_and_choices, captured.tools
            made.additional_histories += captured.additional_histories
            made.metrics |= captured.metrics
            made.logs += captured.logs
        return made

    return wrapped


def init_chat_model(model: str | None = None, **options: Any) -> Any:
    """A `langchain_openai.ChatOpenAI` for the model of the current rollout. `options` are its own, such as temperature,
    max_tokens, streaming. `model` is another name of the server, for example an earlier step.

    Raises:
        RuntimeError: outside a function that `wrap_rollout` runs.
    """
    opened = _current.get()
    if opened is None:
        raise RuntimeError(
            "init_chat_model is called inside a rollout: call the rollout by `wrap_rollout(model, rollout)(...)`"
        )
    module: Any = importlib.import_module("langchain_openai")  # a package of the program
    for name in ("model_provider", "logprobs", "top_logprobs"):
        options.pop(name, None)  # the server records log-probabilities without them
    address = {"base_url": opened.base_url, "api_key": opened.api_key}
    name = model or opened.model.get_inference_name()
    return module.ChatOpenAI(**{"model": name, "temperature": 1.0, **address, **options})


alias(__name__, f"{__name__}.llm_wrapper")
