"""A coding agent's long session: 300 turns and 100,000 tokens, three compactions and eight sub-agents. Each turn is recorded with exactly the
tokens that one gets by tokenising the conversation by hand, all turns join, and what is stored grows with the conversation and not with
its square.

The texts of the answers are forced by a grammar with one choice; their tokens are sampled."""

import asyncio
import itertools
import json
import shutil
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from transformers import AutoTokenizer

import art
from art_server.ledger.records import Record
from art_server.store.base_models import TINY_DIR
from tests.engine.integration.answers import session_records
from tests.live import PROJECT, Server
from tests.waiting import PATIENCE_SECONDS

NAME = "long"
SEGMENTS, MAIN_TURNS, SUB_AGENTS, SUB_TURNS = 4, 65, 2, 5
"""The main conversation's parts, three of which end in a summary; their turns; sub-agents of a part, and the turns of a sub-agent."""
END = "<|im_end|>"
RULES = (
    "You are an agent that edits code. " + "Read a file before you change the file, and run the tests afterwards. " * 20
)
REVIEW = "You look for one thing in a folder, and report where the thing is. " * 5
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": f"To {name} a file.", "parameters": {"type": "object"}},
    }
    for name in ("read", "write", "search", "run")
]
Messages = list[dict[str, Any]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    own = Server(tmp_path_factory.mktemp("long"))
    base = own.path / "tiny"
    shutil.copytree(TINY_DIR, base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 131_072}))
    own.arguments = ["--base-model", str(base), "--max-seq-length", "32768", "--kv-cache-gb", "2"]
    with own.running():
        yield own


class Agent:
    """Asks as a coding agent does: its whole conversation at each turn."""

    def __init__(self, http: httpx.Client, address: str, model: str):
        self.http, self.address, self.model = http, address, model
        self.numbers = itertools.count()
        self.conversations: list[Messages] = []
        """As they were when they ended, with the last answer."""

    def turn(self, messages: Messages, said: str) -> Messages:
        """The conversation with the answer."""
        body = {"model": self.model, "messages": messages, "tools": TOOLS, "max_tokens": 200}
        reply = self.http.post(
            f"{self.address}/chat/completions", json=body | {"structured_outputs": {"choice": [said]}}
        )
        assert reply.status_code == 200, reply.text
        answer = reply.json()["choices"][0]["message"]["content"]
        assert answer == said
        return [*messages, {"role": "assistant", "content": answer}]

    def work(self, messages: Messages, num_turns: int) -> Messages:
        for number in itertools.islice(self.numbers, num_turns):
            messages = self.turn(messages, f"I look at file {number}.")
            messages = [*messages, {"role": "user", "content": result(number)}]
        return messages

    def delegate(self, what: str) -> None:
        talk = self.work([{"role": "system", "content": REVIEW}, {"role": "user", "content": what}], SUB_TURNS)
        self.conversations.append(talk[:-1])

    def play(self) -> None:
        first = "Mend the parser of the folder, so that its tests pass."
        for segment in range(SEGMENTS):
            is_last = segment == SEGMENTS - 1
            messages = self.work(
                [{"role": "system", "content": RULES}, {"role": "user", "content": first}], MAIN_TURNS // 2
            )
            for number in range(SUB_AGENTS):
                self.delegate(f"Where is thing {segment}.{number}?")
            messages = self.work(messages, MAIN_TURNS - MAIN_TURNS // 2 - 1)
            summary = f"This is the summary of part {segment}." if not is_last else "The parser works."
            messages = self.turn([*messages, {"role": "user", "content": "Summarise."}], summary)
            self.conversations.append(messages)
            first = f"This goes on from an earlier conversation: {summary} " + "It was long. " * 20


def result(number: int) -> str:
    """What a tool answers: about 350 tokens."""
    return "\n".join(f"{line}: value_{number}_{line} = function(argument_{line})" for line in range(17))


def by_hand(tokenizer: Any, messages: Messages, sampled: list[list[int]]) -> list[int]:
    """The tokens of a conversation: the template's text, tokenised between the answers, and the answers' own tokens."""
    text: str = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    ids: list[int] = []
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    for answer, tokens in zip(answers, sampled, strict=True):
        before, _, text = text.partition(f"<|im_start|>assistant\n{answer}{END}")
        ids += tokenizer.encode(f"{before}<|im_start|>assistant\n", add_special_tokens=False) + tokens
    return ids


def test_a_session_of_300_turns_is_exact(server: Server) -> None:
    asyncio.run(run(server))


async def run(server: Server) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(TINY_DIR))
    assert server.process is not None
    memory = psutil.Process(server.process.pid)
    async with art.Backend(server.url) as backend:
        model = art.TrainableModel(name=NAME, project=PROJECT, base_model=str(server.path / "tiny"))
        await model.register(backend)
        rollout = art.rollout(model, "long")
        with httpx.Client(timeout=PATIENCE_SECONDS) as http:
            agent = Agent(http, rollout.base_url, model.get_inference_name())
            before = memory.memory_info().rss
            await asyncio.to_thread(agent.play)
        records = session_records(server, "long", NAME)
        assert len(records) == SEGMENTS * (MAIN_TURNS + SUB_AGENTS * SUB_TURNS)
        num_tokens = check_tokens(tokenizer, agent, records)
        began = time.perf_counter()
        trajectory = await rollout.trajectory(1.0)
        seconds = time.perf_counter() - began
        other = art.rollout(model, "short")
        with httpx.Client(timeout=PATIENCE_SECONDS) as http:
            await asyncio.to_thread(Agent(http, other.base_url, model.get_inference_name()).delegate, "Nothing?")
        asked_at = time.perf_counter()
        trained = await model.train([art.TrajectoryGroup([trajectory, await other.trajectory(0.0)])])
        report = trained.report
    kinds = {name: trajectory.metrics.get(name) for name in ("context_resets", "sub_agents", "unused_choices")}
    assert kinds == {"context_resets": SEGMENTS - 1, "sub_agents": SEGMENTS * SUB_AGENTS, "unused_choices": None}
    assert report is not None
    num_turns = len(records) + SUB_TURNS
    assert report.turns == {"ledger": num_turns}
    assert report.num_rows == SEGMENTS * (1 + SUB_AGENTS) + 1
    assert report.continuations == {"joined": num_turns - report.num_rows} and report.differences == []
    ledger = server.path / "art" / ".server" / "ledger.sqlite"
    figures = {
        "turns": len(records),
        "tokens": num_tokens,
        "seconds of the trajectory": round(seconds, 2),
        "seconds of the step": round(time.perf_counter() - asked_at, 1),
        "server's memory grew by MB": round((memory.memory_info().rss - before) / 1e6, 1),
        "ledger MB": round(sum(file.stat().st_size for file in ledger.parent.glob("ledger.sqlite*")) / 1e6, 1),
    }
    print(json.dumps(figures))


def check_tokens(tokenizer: Any, agent: Agent, records: list[Record]) -> int:
    """Compares each conversation's records with its tokens by hand. Returns the number of all tokens."""
    by_text = {tokenizer.decode(record.token_ids).removesuffix(END): record for record in records}
    num_tokens = 0
    for messages in agent.conversations:
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        of_talk = [by_text[answer] for answer in answers]
        expected = by_hand(tokenizer, messages, [record.token_ids for record in of_talk])
        sequences = [record.prompt_token_ids + record.token_ids for record in of_talk]
        assert all(sequence == expected[: len(sequence)] for sequence in sequences)
        assert sequences[-1] == expected
        num_tokens += len(expected)
    assert num_tokens >= 100_000
    return num_tokens
