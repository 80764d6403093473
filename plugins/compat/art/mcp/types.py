"""The records of `art.mcp`: tools and resources of an MCP server, and the scenarios made for them."""

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast, overload

from art_protocol.display import Short

DIFFICULTIES = range(1, 6)
MAX_BAR = 30


@dataclass
class MCPTool:
    """A tool of an MCP server."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict[str, Any])
    """JSON schema of the tool's arguments."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """A tool from ART's form, or from MCP's own, which calls the schema `inputSchema`."""
        parameters: dict[str, Any] = data.get("parameters") or data.get("inputSchema") or {}
        return cls(data.get("name", ""), data.get("description") or "", parameters)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }


@dataclass
class MCPResource:
    """A resource of an MCP server."""

    uri: str
    name: str
    description: str = ""
    mime_type: str | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        kind = data.get("mimeType") or data.get("mime_type")
        uri, name = str(data.get("uri", "")), data.get("name", "")
        return cls(uri, name, data.get("description") or "", kind)

    def to_dict(self) -> dict[str, Any]:
        kind = {"mimeType": self.mime_type} if self.mime_type else {}
        return {"uri": self.uri, "name": self.name, "description": self.description, **kind}


@dataclass
class GeneratedScenario:
    """A task for an agent, and its difficulty from 1 to 5.

    Raises:
        ValueError: the difficulty is no integer from 1 to 5.
    """

    task: str
    difficulty: int

    def __post_init__(self) -> None:
        if type(self.difficulty) is not int or self.difficulty not in DIFFICULTIES:
            raise ValueError(f"difficulty is an integer from 1 to 5, not {self.difficulty!r}")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(task=str(data["task"]), difficulty=data["difficulty"])

    def to_dict(self) -> dict[str, Any]:
        return {"task": self.task, "difficulty": self.difficulty}

    def preview(self, max_length: int = 120) -> str:
        """The task, cut to `max_length` characters."""
        is_short = len(self.task) <= max_length
        return self.task if is_short else self.task[:max_length].strip() + "…"


class GeneratedScenarioCollection(Sequence[GeneratedScenario]):
    """Scenarios in their order."""

    def __init__(self, scenarios: Sequence[GeneratedScenario]):
        self.scenarios = list(scenarios)

    def __repr__(self) -> str:
        return f"GeneratedScenarioCollection({Short(self.scenarios)!r})"

    def __len__(self) -> int:
        return len(self.scenarios)

    def __iter__(self) -> Iterator[GeneratedScenario]:
        return iter(self.scenarios)

    @overload
    def __getitem__(self, index: int) -> GeneratedScenario: ...
    @overload
    def __getitem__(self, index: slice) -> list[GeneratedScenario]: ...
    def __getitem__(self, index: int | slice) -> GeneratedScenario | list[GeneratedScenario]:
        return self.scenarios[index]

    @classmethod
    def from_dicts(cls, data: Sequence[Mapping[str, Any]]) -> Self:
        return cls([GeneratedScenario.from_dict(fields) for fields in data])

    @classmethod
    def from_json(cls, json_str: str) -> Self:
        """From the text of `to_json`, or of a list of scenarios.

        Raises:
            ValueError: the text is no JSON of scenarios.
        """
        data = json.loads(json_str)
        entries: Any = cast("dict[str, Any]", data).get("scenarios") if isinstance(data, dict) else data
        if not isinstance(entries, list):
            raise ValueError('the text has no list "scenarios"')
        return cls.from_dicts(cast("list[Any]", entries))

    def to_dicts(self) -> list[dict[str, Any]]:
        return [scenario.to_dict() for scenario in self.scenarios]

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps({"scenarios": self.to_dicts()}, indent=indent)

    def shuffle(self) -> Self:
        """A new collection in random order."""
        return type(self)(random.sample(self.scenarios, len(self.scenarios)))

    def split(self, train_size: int) -> tuple[Self, Self]:
        """The first `train_size` scenarios, and the others.

        Raises:
            ValueError: there are fewer scenarios than `train_size`.
        """
        if train_size > len(self):
            raise ValueError(f"train_size is {train_size}, but there are {len(self)} scenarios")
        return type(self)(self.scenarios[:train_size]), type(self)(self.scenarios[train_size:])

    def filter_by_difficulty(self, min_difficulty: int = 1, max_difficulty: int = 5) -> Self:
        kept = [scenario for scenario in self.scenarios if min_difficulty <= scenario.difficulty <= max_difficulty]
        return type(self)(kept)

    def get_difficulty_distribution(self) -> Counter[int]:
        return Counter(scenario.difficulty for scenario in self.scenarios)

    def preview(self, n: int = 5, max_task_length: int = 120) -> None:
        """Prints the first `n` scenarios."""
        for number, scenario in enumerate(self.scenarios[:n], start=1):
            print(f"{number}. {scenario.preview(max_task_length)}  (difficulty {scenario.difficulty}/5)")

    def print_difficulty_distribution(self) -> None:
        counts = self.get_difficulty_distribution()
        for difficulty in DIFFICULTIES:
            count = counts[difficulty]
            print(f"difficulty {difficulty}/5: {count:3d}  {'█' * min(count, MAX_BAR)}")

    def get_summary(self) -> dict[str, Any]:
        divisor = len(self) or 1
        return {
            "total_scenarios": len(self),
            "difficulty_distribution": dict(self.get_difficulty_distribution()),
            "avg_difficulty": sum(scenario.difficulty for scenario in self.scenarios) / divisor,
            "avg_task_length": sum(len(scenario.task) for scenario in self.scenarios) / divisor,
        }
