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

from art.sessions import Rollout, rollout
from art.trajectories import Trajectory
from art_compat.aliases import alias
from art_compat.models import TrainableModel

P = ParamSpec("P")

_current: ContextVar[Rollout | None] = ContextVar("_current", default=None)


def wrap_rollout(model: TrainableModel, fn: Callable[P, Awaitable[Trajectory]]) -> Callable[P, Awaitable[Trajectory]]:
    """The function, wrapped so that the trajectory in its result contains the agent's conversations.

    Chat models that `init_chat_model` makes inside the function belong to the rollout. If the function itself puts messages
    into the trajectory, these messages stay.
    """

    @functools.wraps(fn)
    async def wrapped(*args: P.args, **kwargs: P.kwargs) -> Trajectory:
        async with rollout(model) as opened:
            token = _current.set(opened)
            try:
                trajectory = await fn(*args, **kwargs)
            finally:
                _current.reset(token)
            captured = await opened.trajectory(reward=trajectory.reward)
        if not trajectory.messages_and_choices:
            trajectory.messages_and_choices, trajectory.tools = captured.messages_and_choices, captured.tools
            trajectory.additional_histories += captured.additional_histories
            trajectory.metrics |= captured.metrics
            trajectory.logs += captured.logs
        return trajectory

    return wrapped


def init_chat_model(model: str | None = None, **options: Any) -> Any:
    """A `langchain_openai.ChatOpenAI` for the model of the current rollout. `options` are options of ChatOpenAI, such as
    temperature, max_tokens, streaming. `model` is another name of the server, for example an earlier step.

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
