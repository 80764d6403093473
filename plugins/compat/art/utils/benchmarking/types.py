"""What a chart compares."""

from dataclasses import dataclass


@dataclass
class BenchmarkModelKey:
    """A model's rollouts of one split, and the name under which a chart shows them."""

    name: str
    display_name: str = ""
    split: str = "val"

    def __post_init__(self) -> None:
        self.display_name = self.display_name or self.name

    def __str__(self) -> str:
        return self.display_name
