"""Questions about cities, for agents with tools. Each question needs one tool. art/tiny calls the tool for some wordings only."""

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass

CITIES = ("Paris", "London", "Berlin", "Rome", "Madrid", "Vienna", "Oslo", "Cairo", "Tokyo", "Lima")
HELD_OUT_CITIES = ("Athens", "Dublin", "Warsaw", "Lisbon", "Prague", "Delhi", "Seoul", "Quito")


def get_population(city: str) -> str:
    """Get the population of a city."""
    return str(zlib.crc32(city.encode()) % 100_000)


def get_time(city: str) -> str:
    """Get the time in a city."""
    return f"{zlib.crc32(city.encode()) % 24:02}:{zlib.crc32(city.encode()) % 60:02}"


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"{zlib.crc32(city.encode()) % 40} degrees"


TOOLS: list[Callable[[str], str]] = [get_population, get_time, get_weather]
QUESTIONS: list[tuple[str, Callable[[str], str]]] = [
    ("How big is {}?", get_population),
    ("How large is {}?", get_population),
    ("What time is it in {}?", get_time),
    ("How hot is {}?", get_weather),
    ("How warm is it in {}?", get_weather),
]
"""Questions with the tool that each needs. art/tiny knows the question about the time and was taught none of the others."""


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    answer: str
    """What the right tool returns for the question's city."""


def draw_question(seed: str) -> Question:
    rng = random.Random(seed)
    cities = HELD_OUT_CITIES if seed.startswith("held out") else CITIES
    (text, tool), city = rng.choice(QUESTIONS), rng.choice(cities)
    return Question(text.format(city), tool(city))
