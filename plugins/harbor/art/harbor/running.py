"""A rollout of a task: the agent in a box, then the tests in the same box, then the reward in the tests' files."""

import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import art
from art.harbor.bubblewrap import Bubblewrap
from art.harbor.errors import TaskRefused, TestsTimedOut
from art.harbor.gateway import KEY, Gateway
from art.harbor.rewards import read_reward
from art.harbor.sandbox import Sandbox
from art.harbor.tasks import Task
from art_protocol.wire import HistoryKind

INSTRUCTION = "/art/instruction.md"
TESTS, RESULTS = "/tests", "/logs/verifier"
LOGGED = 4000
"""Characters of the end of an output that a trajectory's logs have."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command did in a task."""

    reward: float
    metrics: dict[str, float | int | bool]
    """Seconds and exit codes of agent and tests, whether the agent took too long, and the other numbers of reward.json."""
    agent_output: str
    """The end of what the agent printed."""
    tests_output: str

    def note_in(self, trajectory: art.Trajectory) -> None:
        """Gives a trajectory the metrics, and the ends of the outputs as logs."""
        trajectory.metrics.update(self.metrics)
        for name, output in (("agent", self.agent_output), ("tests", self.tests_output)):
            if output.strip():
                trajectory.log(f"the {name} printed: {output.strip()[-LOGGED:]}")


async def run(
    task: Task,
    command: str,
    rollout: art.Rollout,
    *,
    sandbox: Sandbox | None = None,
    leave_out: Collection[HistoryKind] = ("side_call",),
) -> art.Trajectory:
    """One rollout of a task: any agent's command in a sandbox, which reaches the rollout's session and else nothing.

    `{instruction}` in the command is the task's instruction, quoted for a shell. The agent finds the instruction also in the
    file /art/instruction.md, and the model in OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL and the same names with ANTHROPIC. An
    agent that takes longer than `agent.timeout_sec` is killed, and the tests run all the same. The default sandbox is
    `Bubblewrap()`. `leave_out` has the kinds of conversations that are not trained, as in `Rollout.trajectory`: titles and probes.

    Raises:
        TaskRefused: the sandbox cannot give what the task needs.
        SandboxFailed: the sandbox did not start, or ended.
        TestsTimedOut: the tests took too long.
        RewardInvalid: the tests wrote no reward, or a wrong one.
    """
    outcome = await attempt(task, command, rollout, sandbox=sandbox)
    trajectory = await rollout.trajectory(outcome.reward, metadata={"task": task.name}, leave_out=leave_out)
    outcome.note_in(trajectory)
    return trajectory


async def attempt(task: Task, command: str, rollout: art.Rollout, *, sandbox: Sandbox | None = None) -> Outcome:
    """How an agent's command does in a task, as in `run`, without the trajectory."""
    gateway = Gateway(rollout.root_url, rollout.api_key)
    model = rollout.model.get_inference_name()
    variables = {
        "OPENAI_BASE_URL": f"{gateway.root_url}/v1",
        "OPENAI_API_KEY": KEY,
        "OPENAI_MODEL": model,
        "ANTHROPIC_BASE_URL": gateway.root_url,
        "ANTHROPIC_API_KEY": KEY,
        "ANTHROPIC_MODEL": model,
    }
    return await play(task, command, variables=variables, gateway=gateway, sandbox=sandbox)


async def solve(task: Task, *, sandbox: Sandbox | None = None) -> Outcome:
    """How the task's own solution does. A task whose solution gets less than a full reward does not work in the sandbox.

    Raises:
        TaskRefused: the task has no solution. See `run` for the others.
    """
    if not (task.solution / "solve.sh").is_file():
        raise TaskRefused(f"the task {task.name} has no solution/solve.sh")
    return await play(
        task,
        "bash /solution/solve.sh",
        variables=task.settings.solution.env,
        folders={"/solution": task.solution},
        sandbox=sandbox,
    )


async def play(
    task: Task,
    command: str,
    *,
    variables: Mapping[str, str] | None = None,
    folders: Mapping[str, Path] | None = None,
    gateway: Gateway | None = None,
    sandbox: Sandbox | None = None,
) -> Outcome:
    """How a command does in a task. `run` has the errors."""
    box = await (sandbox or Bubblewrap()).start(task)
    try:
        agent = await box.exec(
            command.replace("{instruction}", shlex.quote(task.instruction)),
            env=variables or {},
            timeout_seconds=task.settings.agent.timeout_sec,
            files={INSTRUCTION: task.instruction},
            folders=folders,
            gateway=gateway,
        )
        tests = await box.exec(
            f"bash {TESTS}/test.sh",
            env=task.settings.verifier.env,
            timeout_seconds=task.settings.verifier.timeout_sec,
            folders={TESTS: task.tests},
            results=RESULTS,
        )
    finally:
        await box.stop()
    if tests.exit_code is None:
        seconds = task.settings.verifier.timeout_sec
        raise TestsTimedOut(f"the tests of {task.name} took longer than verifier.timeout_sec ({seconds:g} s)")
    reward, numbers = read_reward(tests.results)
    metrics: dict[str, float | int | bool] = {
        **numbers,
        "agent_seconds": agent.seconds,
        "agent_timed_out": agent.exit_code is None,
        "tests_seconds": tests.seconds,
        "tests_exit_code": tests.exit_code,
    }
    if agent.exit_code is not None:
        metrics["agent_exit_code"] = agent.exit_code
    return Outcome(reward, metrics, agent.output, tests.output)
