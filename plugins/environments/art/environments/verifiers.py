"""verifiers' tasksets as rollouts: `VerifiersEnvironment` (needs the package `verifiers`, 0.4 or later).

    async with VerifiersEnvironment("gsm8k-v1") as environment:
        tasks = environment.tasks(64)
        groups = await environment.gather(model, tasks[:8], group_size=8)
        await model.train(groups)

verifiers sends the id of each rollout's trace as the header X-Session-ID, which names a session on the server. So a
trajectory comes from the server, exact to the token, whichever program has made the requests.
"""

import hashlib
import itertools
import os
import sys
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import verifiers.v1 as vf
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.episode import Episode
from verifiers.v1.runtimes import PrimeConfig, SubprocessConfig
from verifiers.v1.utils.loaders import (
    default_harness_id,
    env_config_type,
    load_environment,
    resolve_env_config,
)

from art.environments import in_process
from art.gather import gather_trajectory_groups
from art.model import TrainableModel
from art.pool import DEFAULT_MAX_EXCEPTIONS
from art.sessions import rollout
from art.trajectories import Trajectory, TrajectoryGroup

UNREWARDED_STOPS = {"setup_timeout", "finalize_timeout", "scoring_timeout"}
"""Stages that were cut off outside of the agent's own time. verifiers takes the trace as it is then, with a reward that says
nothing about the agent. After an "agent_timeout" the reward is complete."""
OWN_HARNESS = "art_in_process"
sys.modules[OWN_HARNESS] = in_process  # verifiers imports a harness by a name without dots


class EpisodeFailed(Exception):
    """An episode that ended with errors or before it was scored, which has no reward."""


class VerifiersEnvironment:
    """An environment of verifiers: a taskset, and the agents that play it.

    `config` is the id of an installed taskset, or verifiers' own configuration of an environment, such as
    `{"taskset": {"id": "textarena", "game": "Wordle-v0"}, "player": {"max_turns": 6}}`. Agents without a harness of
    their own are played in this process, by a chat loop with the task's tools. Agents without a runtime run on this machine.

    Raises:
        ModuleNotFoundError: there is no such taskset, harness or environment.
        pydantic.ValidationError: the configuration has a wrong value.
    """

    def __init__(self, config: str | Mapping[str, Any]) -> None:
        raw = {"taskset": {"id": config}} if isinstance(config, str) else dict(config)
        self.environment = load_environment(resolve_env_config(_with_defaults(raw)))
        self._serving: Any = None

    async def __aenter__(self) -> Self:
        self._serving = self.environment.serving()
        await self._serving.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        serving, self._serving = self._serving, None
        await serving.__aexit__(kind, error, traceback)

    def tasks(self, count: int | None = None, *, skip: int = 0) -> list[vf.Task[Any, Any, Any]]:
        """The taskset's tasks from `skip` on, in its order; `count` of them, or all.

        Raises:
            ValueError: the taskset is infinite, and `count` is None.
        """
        if count is None and not self.environment.taskset.bounded:
            raise ValueError("this taskset is infinite: give tasks() a count")
        stop = None if count is None else skip + count
        return list(itertools.islice(self.environment.taskset, skip, stop))

    async def rollout(self, model: TrainableModel, task: vf.Task[Any, Any, Any], **sampling: Any) -> Trajectory:
        """One episode in which one agent is trained. `sampling` goes into each request (temperature, max_tokens...).

        The trajectory has the trace's reward, its metrics, and each reward by name as a metric "reward/NAME".

        Raises:
            EpisodeFailed: the episode ended with an error, or its setup, finalize or scoring took too long. It has no reward.
            ValueError: several agents were trained; `gather` takes those.
        """
        found = await self._play(model, task, sampling)
        if len(found) != 1:
            names = ", ".join(name for name, _ in found) or "none"
            raise ValueError(f"a rollout is of one agent, and {len(found)} were trained ({names}): call gather()")
        return found[0][1]

    async def gather(
        self,
        model: TrainableModel,
        tasks: Iterable[vf.Task[Any, Any, Any]],
        group_size: int,
        *,
        max_exceptions: int | float = DEFAULT_MAX_EXCEPTIONS,
        **sampling: Any,
    ) -> list[TrajectoryGroup]:
        """`group_size` episodes of each task: a group for each task, or for each task and agent if several are trained.

        Failed episodes are in `exceptions` of each of their task's groups; they have no reward. `max_exceptions` is that of
        `gather_trajectory_groups`.
        """
        found: list[dict[str, list[Trajectory]]] = []

        async def one(task: vf.Task[Any, Any, Any], of_task: dict[str, list[Trajectory]]) -> Trajectory:
            played = await self._play(model, task, sampling)
            for name, trajectory in played:
                of_task.setdefault(name, []).append(trajectory)
            if not played:
                raise EpisodeFailed("no agent of this episode plays the model that is trained")
            return played[0][1]

        def group(task: vf.Task[Any, Any, Any]) -> TrajectoryGroup:
            found.append({})
            return TrajectoryGroup(one(task, found[-1]) for _ in range(group_size))

        done = await gather_trajectory_groups((group(task) for task in tasks), max_exceptions=max_exceptions)
        return [
            TrajectoryGroup(trajectories, exceptions=each.exceptions, metadata={"agent": name})
            for each, of_task in zip(done, found, strict=True)
            for name, trajectories in (of_task or {"agent": []}).items()
        ]

    async def _play(
        self, model: TrainableModel, task: vf.Task[Any, Any, Any], sampling: Mapping[str, Any]
    ) -> list[tuple[str, Trajectory]]:
        """Each trained agent's name and trajectory of one episode."""
        if self._serving is None:
            raise RuntimeError("a VerifiersEnvironment plays inside `async with` only")
        variable, name = _export_key(model), model.get_inference_name()
        context = vf.ModelContext(
            model=name,
            client=vf.EvalClientConfig(base_url=f"{model.backend().base_url}/v1", api_key_var=variable),
            sampling=vf.SamplingConfig.model_validate(sampling),
        )
        episode = await self.environment.run_episode(task, context)
        if not episode.ok:
            raise EpisodeFailed(_reason(episode))
        return [
            (trace.agent.name, await _to_trajectory(model, trace))
            for trace in episode.traces
            if trace.agent.trainable and trace.agent.config.model == name
        ]


def _export_key(model: TrainableModel) -> str:
    """Puts the model's API key into an environment variable of its own, and returns its name. verifiers reads keys from
    there only, at each request. It hides variables with API_KEY in their names from an agent's programs."""
    key = model.inference_api_key or "default"
    name = f"ART_{hashlib.sha256(key.encode()).hexdigest()[:16]}_API_KEY"
    os.environ[name] = key
    return name


def _check_reward(trace: vf.Trace[Any, Any, Any]) -> None:
    """Raises EpisodeFailed if the trace has no complete reward: what is missing counts as 0 in `trace.reward`."""
    reasons = [f"{name} was not scored" for name, each in trace.rewards.items() if each is None]
    if trace.stop_condition in UNREWARDED_STOPS:
        reasons.insert(0, str(trace.stop_condition))
    if reasons:
        raise EpisodeFailed(f"agent '{trace.agent.name}' has no reward: {', '.join(reasons)}")


async def _to_trajectory(model: TrainableModel, trace: vf.Trace[Any, Any, Any]) -> Trajectory:
    _check_reward(trace)
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    rewards = {f"reward/{name}": each.value for name, each in trace.rewards.items() if each is not None}
    metadata = {"task": trace.task.data.name or trace.task.key, "stop": trace.stop_condition}
    async with rollout(model, trace.id) as played:
        return await played.trajectory(
            trace.reward,
            metrics={**metrics, **rewards, "num_turns": trace.num_turns},
            metadata={name: value for name, value in metadata.items() if value is not None},
        )


def _reason(episode: Episode[Any, Any, Any]) -> str:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    texts = dict.fromkeys(f"{error.type}: {error.message}" for error in errors)
    return "; ".join(texts) or "the episode is not ok"


def _with_defaults(raw: dict[str, Any]) -> dict[str, Any]:
    """The configuration with a harness and a runtime for the agents that have none."""
    taskset, environment = raw.get("taskset") or {}, raw.get("id") or ""
    identity = taskset.get("id", "") if isinstance(taskset, Mapping) else taskset.id
    has_harness = default_harness_id(identity) == identity
    for name, field in env_config_type(identity, environment).model_fields.items():
        default = field.default
        if not isinstance(default, AgentConfig):
            continue
        given = raw.get(name) or {}
        seat = given.model_dump(exclude_unset=True) if isinstance(given, AgentConfig) else dict(given)
        if default.harness is None and not has_harness:
            seat.setdefault("harness", {"id": OWN_HARNESS})
        if isinstance(default.runtime, PrimeConfig):
            seat.setdefault("runtime", SubprocessConfig().model_dump())
        raw[name] = seat
    return raw
