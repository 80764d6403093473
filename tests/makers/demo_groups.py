"""Groups of rollouts for `demo.make_demo`: messages and choices, traces of turns, and the columns of a token record."""

import json
import random
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from art_server.jobs.turns import TurnTrace

HOSTILE = '<img src=x onerror="window.wasHit=1"><script>window.wasHit=1</script>" onmouseover="x" {{7*7}}'
SYSTEM = (
    "You are a travel agent's assistant. Answer with a tool call or with the final answer. Prices are in euros. "
    "Think in one short sentence before each call. Never invent a flight that the tool did not return."
)
QUESTIONS = (
    "What is the cheapest flight from Lisbon to Vienna on 12 May?",
    "Book the earliest train from Turin to Lyon for two people.",
    "Which hotel near the harbour in Bergen takes a dog?",
    "Move my booking QF81 to the next day and tell me the difference in price.",
)
THOUGHTS = ("I look for all offers first.", "I search with the date that was given.", "I compare.")
ANSWERS = (
    "The cheapest is OS 482 at 118 euros, with one stop in Zurich.",
    "It is TP 1276 at 143 euros, without a stop.",
    "I found three offers between 118 and 240 euros; the first is OS 482.",
    "No offer fits the date. On 13 May there is one at 99 euros.",
)
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
RESULT = '[{"flight": "OS 482", "price": 118}, {"flight": "TP 1276", "price": 143}]'
DEAD, FAILED, CHANGED, HOSTILE_GROUP = 1, 2, 3, 4
"""Places of the groups of a special kind among those that are repeated."""
NUM_DISTINCT = 24
MIN_LOGPROB = -9.0


class Words:
    """A tokenizer of words."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        pieces = re.findall(r"<\|\w+\|>| ?\w+|[^\w\s]|\s", text)
        return [self.ids.setdefault(piece, 1000 + len(self.ids)) for piece in pieces]

    def texts(self) -> dict[int, str]:
        return {token: text for text, token in self.ids.items()}


@dataclass(slots=True)
class TokenSequence:
    """A token sequence; `sampled` has the spans that the policy sampled."""

    ids: list[int] = field(default_factory=list)
    sampled: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DemoGroup:
    """A group: the line of its trajectories file, and the columns of its token record."""

    row: dict[str, Any]
    spans: list[list[int]]
    """For each trajectory the lengths of its sequences."""
    columns: dict[str, np.ndarray]

    @property
    def rewards(self) -> list[float]:
        return [trajectory["reward"] for trajectory in self.row["trajectories"]]


def make_group(words: Words, chance: random.Random, index: int, size: int) -> DemoGroup:
    """A group of rollouts of one task."""
    question = HOSTILE if index == HOSTILE_GROUP else QUESTIONS[index % len(QUESTIONS)]
    level = index / NUM_DISTINCT
    trajectories: list[dict[str, Any]] = []
    sequences: list[list[TokenSequence]] = []
    for number in range(size):
        reward = round(min(1.0, max(0.0, chance.gauss(level, 0.3))), 3)
        if index == DEAD:
            reward = 0.0
        trajectory, of_trajectory = make_trajectory(words, chance, question, index, number, reward)
        trajectories.append(trajectory)
        sequences.append(of_trajectory)
    failure = {"type": "TimeoutError", "message": f"the tool did not answer {HOSTILE}"}
    failure["traceback"] = "Traceback (most recent call last):\n  File agent.py, line 41, in search"
    row = {
        "exceptions": [failure] if index == FAILED else [],
        "metadata": {"scenario": f"booking-{index:03d}", "question": question},
        "metrics": {},
        "logs": [],
        "trajectories": trajectories,
    }
    rewards = [trajectory["reward"] for trajectory in trajectories]
    spans = [[len(sequence.ids) for sequence in of_trajectory] for of_trajectory in sequences]
    return DemoGroup(row, spans, token_columns(chance, sequences, rewards))


def make_trajectory(
    words: Words, chance: random.Random, question: str, index: int, number: int, reward: float
) -> tuple[dict[str, Any], list[TokenSequence]]:
    """A tool call and an answer. In the group CHANGED the second turn begins a new sequence; in others the last
    rollout's first turn is dropped."""
    opening = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    thought, answer = chance.choice(THOUGHTS), chance.choice(ANSWERS)
    arguments = json.dumps({"query": question[:40], "max": chance.choice((3, 5))})
    call = f'{thought}\n<tool_call>{{"name": "search", "arguments": {arguments}}}</tool_call><|im_end|>'
    between = f"\n<|im_start|>tool\n{RESULT}<|im_end|>\n<|im_start|>assistant\n"
    end = f"{answer if index != HOSTILE_GROUP else HOSTILE}<|im_end|>"
    first, second = words.encode(call), words.encode(end)
    is_changed, is_dropped = index == CHANGED, index % 6 == 5 and number == 0
    sequences = [TokenSequence()]
    extend(sequences[0], words.encode(opening), first)
    if is_changed:
        sequences.append(TokenSequence())
        extend(sequences[1], words.encode(opening + thought), [])
    extend(sequences[-1], words.encode(between), second)
    traces = [trace(2, "ids", sequences, 0, None), trace(4, "ledger", sequences, -1, "joined")]
    if is_changed:
        traces[1] = trace(4, "ledger", sequences, -1, "changed")
    if is_dropped:
        traces[0] = {"history": 0, "entry": 2, "dropped": "the engine's record has expired"}
    called = {
        "role": "assistant",
        "content": thought,
        "tool_calls": [{"id": "c1", "function": {"name": "search", "arguments": arguments}}],
    }
    final = {"role": "assistant", "content": end.removesuffix("<|im_end|>")}
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": question},
        choice(called, first, "tool_calls", chance),
        {"role": "tool", "tool_call_id": "c1", "content": RESULT},
        choice(final, second, "length" if number == 3 else "stop", chance),
    ]
    trajectory = {
        "messages": messages,
        "tools": TOOLS,
        "reward": reward,
        "additional_histories": [],
        "metrics": {"num_tool_calls": 1, "is_correct": reward > 0.5},
        "metadata": {"user": HOSTILE} if index == HOSTILE_GROUP else {"seed": number},
        "logs": [f"searched with {arguments}"],
        "turns": traces,
    }
    return trajectory, sequences


def extend(sequence: TokenSequence, context: list[int], sampled: list[int]) -> None:
    sequence.ids.extend(context)
    start = len(sequence.ids)
    sequence.ids.extend(sampled)
    if sampled:
        sequence.sampled.append((start, len(sequence.ids)))


def trace(entry: int, origin: str, sequences: list[TokenSequence], index: int, continues: str | None) -> dict[str, Any]:
    start, stop = sequences[index].sampled[0 if entry == 2 else -1]
    number = index % len(sequences)
    turn = TurnTrace(0, entry, origin, None, continues, 11, number, start, stop)
    return turn.as_json()


def choice(message: dict[str, Any], token_ids: list[int], reason: str, chance: random.Random) -> dict[str, Any]:
    content = [{"token": f"token_id:{token_id}", "logprob": -chance.random()} for token_id in token_ids]
    return {
        "index": 0,
        "message": message,
        "finish_reason": reason,
        "logprobs": {"content": content},
        "token_ids": token_ids,
        "art": {"id": f"{chance.getrandbits(64):016x}", "step": 11, "model": "demo/x", "num_tokens": len(token_ids)},
    }


def logged(row: dict[str, Any]) -> dict[str, Any]:
    """The group as a program logs it: without traces."""
    trajectories = [
        {name: value for name, value in trajectory.items() if name != "turns"} for trajectory in row["trajectories"]
    ]
    return row | {"trajectories": trajectories}


def token_columns(
    chance: random.Random, sequences: list[list[TokenSequence]], rewards: list[float]
) -> dict[str, np.ndarray]:
    """The token record's tensors of a group. Only a group with signal is trained."""
    numbers = np.random.default_rng(chance.getrandbits(32))
    mean, std = float(np.mean(rewards)), float(np.std(rewards))
    num = sum(len(sequence.ids) for of_trajectory in sequences for sequence in of_trajectory)
    columns: dict[str, np.ndarray] = {
        f"{name}_T": np.full(num, np.nan, np.float32)
        for name in ("sampled_logprobs", "trainer_logprobs", "advantages", "ratios", "entropies")
    }
    columns["is_clipped_T"] = np.zeros(num, np.uint8)
    columns["token_ids_T"] = np.array(
        [token for of_trajectory in sequences for sequence in of_trajectory for token in sequence.ids], np.int32
    )
    first = 0
    for of_trajectory, reward in zip(sequences, rewards, strict=True):
        for sequence in of_trajectory:
            for start, stop in sequence.sampled:
                inside = slice(first + start, first + stop)
                surprise = np.maximum(-(numbers.exponential(0.5, stop - start) ** 2), MIN_LOGPROB)
                columns["sampled_logprobs_T"][inside] = surprise
                if std == 0:
                    continue
                columns["trainer_logprobs_T"][inside] = surprise + numbers.normal(0, 0.006, len(surprise))
                columns["advantages_T"][inside] = (reward - mean) / (std + 1e-6)
                columns["ratios_T"][inside] = np.exp(numbers.normal(0, 0.09, len(surprise)))
                columns["entropies_T"][inside] = np.minimum(3.0, -surprise * 0.7)
                columns["is_clipped_T"][inside] = np.abs(columns["ratios_T"][inside] - 1) > 0.2
            first += len(sequence.ids)
    return columns
