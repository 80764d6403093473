"""`play`: a rollout in a text environment with Gymnasium's methods."""

import inspect
from typing import Any, Protocol

from art.core.model import Model
from art.trajectories import Trajectory
from art.types import Message
from art_protocol.signal import to_finite

MAX_TURNS = 32


class TextEnvironment(Protocol):
    """Gymnasium's interface, with texts as observations and actions. The methods may also be `async`."""

    def reset(self, *, seed: int | None = None) -> Any:
        """Begins an episode. Returns the first observation and a dictionary of information."""
        ...

    def step(self, action: str) -> Any:
        """Takes the agent's answer. Returns observation, reward, terminated, truncated and a dictionary of information."""
        ...


async def play(
    model: Model,
    environment: TextEnvironment,
    *,
    seed: int | None = None,
    system_prompt: str | None = None,
    max_turns: int = MAX_TURNS,
    **sampling: Any,
) -> Trajectory:
    """One episode: the model answers each observation, until the environment ends the episode or after `max_turns` answers.

    The reward is the sum of the steps' rewards. The metrics are "num_turns", "truncated" (by the environment or by
    `max_turns`), and the finite numbers in the last step's information. `sampling` goes into each request (max_tokens...).
    Rollouts run side by side, so each rollout needs its own environment if environments have a state. An exception of
    `reset` or `step` ends the rollout as failed.
    """
    observation, _ = await _result(environment.reset(seed=seed))
    system: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
    trajectory = Trajectory(
        messages_and_choices=[*system, {"role": "user", "content": observation}],
        tools=sampling.get("tools"),
        reward=0.0,
    )
    create: Any = model.openai_client().chat.completions.create
    name = model.get_inference_name()
    is_over, num_turns, information = False, 0, dict[str, Any]()
    is_truncated = False
    while not is_over and num_turns < max_turns:
        completion = await create(model=name, messages=trajectory.messages(), **sampling)
        choice = completion.choices[0]
        trajectory.messages_and_choices.append(choice)
        observation, reward, is_terminated, is_truncated, information = await _result(
            environment.step(choice.message.content or "")
        )
        num_turns += 1
        trajectory.reward += float(reward)
        is_over = bool(is_terminated or is_truncated)
        if not is_over and num_turns < max_turns:
            trajectory.messages_and_choices.append({"role": "user", "content": observation})
    numbers = {key: to_finite(value) for key, value in information.items()}
    trajectory.metrics |= {
        **{key: number for key, number in numbers.items() if number is not None},
        "num_turns": num_turns,
        "truncated": bool(is_truncated or not is_over),
    }
    return trajectory


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
