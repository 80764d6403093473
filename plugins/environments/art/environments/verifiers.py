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

from art.core.gather import gather_trajectory_groups
from art.core.model import TrainableModel
from art.environments import in_process
from art.pool import DEFAULT_MAX_EXCEPTIONS
from art.sessions import rollout
from art.trajectories import Trajectory, TrajectoryGroup

UNREWARDED_STOPS = {"setup_timeout", "finalize_timeout", "scoring_timeout"}
"""Stop conditions of stages that were cut off outside of the agent's own time. verifiers then takes the trace as it is, and
the reward says nothing about the agent. After an "agent_timeout" the reward is complete."""
OWN_HARNESS = "art_in_process"
sys.modules[OWN_HARNESS] = in_process  # verifiers imports a harness by a name without dots


class EpisodeFailed(Exception):
    """An episode without a reward: the episode ended with errors, or before it was scored."""


class VerifiersEnvironment:
    """An environment of verifiers: a taskset, and the agents that play it.

    `config` is the id of an installed taskset, or verifiers' own configuration of an environment, such as
    `{"taskset": {"id": "textarena", "game": "Wordle-v0"}, "player": {"max_turns": 6}}`. Agents without their own
    harness are played in this process, by a chat loop with the task's tools. Agents without a runtime run on this machine.

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
        """The taskset's tasks from `skip` on, in the taskset's order; `count` tasks, or all.

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
            EpisodeFailed: the episode ended with an error, or its setup, finalize or scoring took too long.
            ValueError: several agents were trained; `gather` takes several agents.
        """
        played = await self._play(model, task, sampling)
        if len(played) != 1:
            names = ", ".join(name for name, _ in played) or "none"
            raise ValueError(f"a rollout is of one agent, and {len(played)} were trained ({names}): call gather()")
        return played[0][1]

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

        Failed episodes have no reward; they are in `exceptions` of each group of their task. `max_exceptions` is as in
        `gather_trajectory_groups`.
        """
        trajectories_of_tasks: list[dict[str, list[Trajectory]]] = []  # for each task, by the agent's name

        async def play_episode(task: vf.Task[Any, Any, Any], by_agent: dict[str, list[Trajectory]]) -> Trajectory:
            played = await self._play(model, task, sampling)
            for name, trajectory in played:
                by_agent.setdefault(name, []).append(trajectory)
            if not played:
                raise EpisodeFailed("no agent of this episode plays the model that is trained")
            return played[0][1]

        def make_group(task: vf.Task[Any, Any, Any]) -> TrajectoryGroup:
            by_agent: dict[str, list[Trajectory]] = {}
            trajectories_of_tasks.append(by_agent)
            return TrajectoryGroup(play_episode(task, by_agent) for _ in range(group_size))

        # These groups have one trajectory for each episode, and all failures. The result has a group for each agent.
        groups_of_tasks = await gather_trajectory_groups(map(make_group, tasks), max_exceptions=max_exceptions)
        groups: list[TrajectoryGroup] = []
        for group_of_task, by_agent in zip(groups_of_tasks, trajectories_of_tasks, strict=True):
            for name, trajectories in (
                by_agent or {"agent": []}
            ).items():  # if all episodes failed: a group of failures
                group = TrajectoryGroup(trajectories, exceptions=group_of_task.exceptions, metadata={"agent": name})
                groups.append(group)
        return groups

    async def _play(
        self, model: TrainableModel, task: vf.Task[Any, Any, Any], sampling: Mapping[str, Any]
    ) -> list[tuple[str, Trajectory]]:
        """The name and the trajectory of each trained agent of one episode."""
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
            # An environment marks agents such as judges as not trainable, and an agent may be configured with another model.
            if trace.agent.trainable and trace.agent.config.model == name
        ]


def _export_key(model: TrainableModel) -> str:
    """Puts the model's API key into a separate environment variable, and returns the variable's name. verifiers reads keys
    from environment variables only, at each request, and hides variables named *API_KEY* from an agent's programs."""
    key = model.inference_api_key or "default"
    name = f"ART_{hashlib.sha256(key.encode()).hexdigest()[:16]}_API_KEY"
    os.environ[name] = key
    return name


def _check_reward(trace: vf.Trace[Any, Any, Any]) -> None:
    """Raises EpisodeFailed if the trace has no complete reward, because `trace.reward` counts a missing reward as 0."""
    reasons = [f"{name} was not scored" for name, reward in trace.rewards.items() if reward is None]
    if trace.stop_condition in UNREWARDED_STOPS:
        reasons.insert(0, str(trace.stop_condition))
    if reasons:
        raise EpisodeFailed(f"agent '{trace.agent.name}' has no reward: {', '.join(reasons)}")


async def _to_trajectory(model: TrainableModel, trace: vf.Trace[Any, Any, Any]) -> Trajectory:
    _check_reward(trace)
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    rewards = {f"reward/{name}": reward.value for name, reward in trace.rewards.items() if reward is not None}
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
    # A taskset that brings its own harness is also the id of this harness.
    has_harness = default_harness_id(identity) == identity
    for name, field in env_config_type(identity, environment).model_fields.items():
        default = field.default
        if not isinstance(default, AgentConfig):
            continue
        agent = raw.get(name) or {}
        settings = agent.model_dump(exclude_unset=True) if isinstance(agent, AgentConfig) else dict(agent)
        if default.harness is None and not has_harness:
            settings.setdefault("harness", {"id": OWN_HARNESS})
        # verifiers' default is a sandbox in Prime Intellect's cloud.
        if isinstance(default.runtime, PrimeConfig):
            settings.setdefault("runtime", SubprocessConfig().model_dump())
        raw[name] = settings
    return raw
