"""Tasks in Harbor's format, read from their folders. Only the format is read: Harbor itself is not needed.

    task.toml  instruction.md  environment/  tests/test.sh  solution/solve.sh

Keys that are not known are tolerated and listed in `Task.unused`. A value of a wrong type is refused with the field's name.
What a sandbox cannot give is refused by the sandbox, when a rollout starts (`Sandbox.start`).
"""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from art.harbor.errors import TaskRefused

FILE, INSTRUCTION = "task.toml", "instruction.md"
TIMEOUT_SECONDS = 600.0
"""Harbor's default limit for the tests. Harbor has none for the agent; here an agent that hangs would hold the step."""
NetworkMode = Literal["no-network", "public", "allowlist"]


class Section(BaseModel):
    """A table of task.toml. Numbers are numbers and texts are texts: nothing is converted."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)


class AgentSection(Section):
    timeout_sec: float = Field(default=TIMEOUT_SECONDS, gt=0, allow_inf_nan=False)
    """Seconds for the agent. Then the tests run all the same."""
    user: str | int | None = None
    network_mode: NetworkMode | None = None


class VerifierSection(Section):
    timeout_sec: float = Field(default=TIMEOUT_SECONDS, gt=0, allow_inf_nan=False)
    """Seconds for the tests. Tests that take longer are a failed rollout."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the tests."""
    environment_mode: str | None = None
    environment: dict[str, Any] | None = None
    """An environment of the tests alone. It means the mode "separate"."""
    network_mode: NetworkMode | None = None


class EnvironmentSection(Section):
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = Field(default=None, gt=0)
    gpus: int = Field(default=0, ge=0)
    workdir: str | None = None
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the agent and of the tests."""
    healthcheck: dict[str, Any] | None = None
    mcp_servers: list[Any] = Field(default_factory=list[Any])
    allow_internet: bool | None = None
    network_mode: NetworkMode | None = None


class SolutionSection(Section):
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the solution."""


class TaskFile(Section):
    """The file task.toml."""

    schema_version: str | None = None
    version: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any])
    agent: AgentSection = AgentSection()
    verifier: VerifierSection = VerifierSection()
    environment: EnvironmentSection = EnvironmentSection()
    solution: SolutionSection = SolutionSection()
    steps: list[Any] = Field(default_factory=list[Any])
    """The steps of a task with several instructions."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task, which is a scenario of a rollout."""

    name: str
    """The name of the task's folder."""
    folder: Path
    instruction: str
    """The text of instruction.md, for the agent."""
    settings: TaskFile = field(repr=False)
    unused: tuple[str, ...]
    """The keys of task.toml that have no effect here, such as "artifacts"."""

    @property
    def environment(self) -> Path:
        """The folder with the Dockerfile and what the Dockerfile copies. It may be missing."""
        return self.folder / "environment"

    @property
    def tests(self) -> Path:
        return self.folder / "tests"

    @property
    def solution(self) -> Path:
        return self.folder / "solution"


def tasks(folder: str | Path) -> list[Task]:
    """The tasks of a folder, sorted by name: each subfolder with a task.toml. A folder that is a task itself is a list of one.

    Raises:
        TaskRefused: the folder has no task, or a task's files are wrong.
    """
    folder = Path(folder).resolve()
    folders = [folder] if (folder / FILE).is_file() else sorted(file.parent for file in folder.glob(f"*/{FILE}"))
    if not folders:
        raise TaskRefused(f"{folder} has no task: neither {FILE} nor */{FILE} exists")
    return [read_task(folder) for folder in folders]


def read_task(folder: Path) -> Task:
    """The task of one folder.

    Raises:
        TaskRefused: a file is missing or wrong.
    """
    try:
        settings = TaskFile.model_validate(tomllib.loads(_text(folder / FILE)))
    except tomllib.TOMLDecodeError as error:
        raise TaskRefused(f"{folder / FILE} is no TOML: {error}") from error
    except ValidationError as error:
        problems = [f"{_dotted(problem['loc'])}: {problem['msg']}" for problem in error.errors()]
        raise TaskRefused(f"{folder / FILE}: {'; '.join(problems)}") from error
    instruction = _text(folder / INSTRUCTION)
    if not instruction.strip():
        raise TaskRefused(f"{folder / INSTRUCTION} is empty")
    if not (folder / "tests" / "test.sh").is_file():
        raise TaskRefused(f"{folder} has no tests/test.sh, which writes the reward")
    return Task(folder.name, folder, instruction, settings, tuple(_unused(settings)))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise TaskRefused(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TaskRefused(f"{file} is not UTF-8: {error}") from error


def _dotted(location: tuple[int | str, ...]) -> str:
    return ".".join(map(str, location))


def _unused(section: Section, prefix: str = "") -> list[str]:
    names = [prefix + name for name in section.model_extra or {}]
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            names += _unused(value, f"{prefix}{name}.")
    return names
