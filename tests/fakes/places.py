"""Places for tests: this machine with other programs, and a place that starts nothing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from art_protocol.log_file import LogFile
from art_server.jobs.trainer_process import RankProgram
from art_server.process.place import Command, Here, ProcessHere, Program
from art_server.settings import Device
from art_server.shared.trainer_messages import WorkerConfig


@dataclass
class Prepared:
    """A program whose command is known."""

    command: Command

    async def prepare(self) -> Command:
        return self.command


class HereInstead(Here):
    """This machine, where a rank is another program: `arguments` makes its command line from the worker's configuration."""

    def __init__(
        self,
        arguments: Callable[[WorkerConfig], Sequence[str]],
        variables: Mapping[str, str] | None = None,
        machine: str = "this machine",
    ):
        super().__init__(device="cpu", variables=variables)
        self.machine = machine
        self._arguments = arguments

    async def start(self, program: Program, log: LogFile) -> ProcessHere:
        assert isinstance(program, RankProgram)
        command = replace(await program.prepare(), arguments=self._arguments(program.worker))
        return await super().start(Prepared(command), log)


class Elsewhere(Here):
    """The place of a rank that never starts, on a machine of any name."""

    def __init__(self, machine: str, device: Device = "cpu", silence_seconds: float = 0.0):
        super().__init__(device=device)
        self.machine = machine
        self.silence_seconds = silence_seconds

    async def start(self, program: Program, log: LogFile) -> Any:
        raise AssertionError(f"nothing starts on {self.machine}")
