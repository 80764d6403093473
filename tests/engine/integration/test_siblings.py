"""Many rollouts of one prompt with equal visible answers and different thinking: none gets another's thinking."""

import asyncio
import json
from typing import Any

import httpx

from art_server.ledger.decoder import Decoder
from art_server.ledger.ledger import Ledger
from art_server.ledger.records import Record
from art_server.store.base_models import TINY_DIR
from tests.live import PROJECT, Server, register, train
from tests.waiting import PATIENCE_SECONDS

PICK = {
    "type": "function",
    "function": {
        "name": "pick",
        "description": "Pick the word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "enum": ["maybe"]}},
            "required": ["word"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
NUM_GROUPS, GROUP_SIZE, NUM_TURNS = 8, 4, 3
KINDS = [
    (returns_thinking, has_session, is_stream)
    for returns_thinking in (True, False)
    for has_session in (True, False)
    for is_stream in (True, False)
]
"""One group of each."""


class Rollout:
    """One conversation with three calls of the only tool, and the server's data about each."""

    def __init__(self, model: str, group: int, index: int) -> None:
        self.returns_thinking, self.has_session, self.is_stream = KINDS[group]
        self.name = f"siblings-{group}-{index}"
        self.model = model
        self.messages: list[dict[str, Any]] = [
            {"role": "user", "content": f"Think, and pick a word, please ({group})."}
        ]
        self.choice_ids: list[str] = []
        self.choices: list[dict[str, Any]] = []

    async def play(self, client: httpx.AsyncClient) -> None:
        for _ in range(NUM_TURNS):
            await self.take_turn(client)

    async def take_turn(self, client: httpx.AsyncClient) -> None:
        body = {
            "model": self.model,
            "messages": self.messages,
            "tools": [PICK],
            "tool_choice": "required",
            "max_tokens": 120,
            "stream": self.is_stream,
            "chat_template_kwargs": {"enable_thinking": True},
        }
        headers = {"x-art-session": self.name} if self.has_session else {}
        response = await client.post("/v1/chat/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        message, identity = self.read(response)
        self.choice_ids.append(identity)
        self.choices.append({"message": message, "finish_reason": "stop", "art": {"id": identity}})
        sent = dict(message)
        thinking = sent.pop("reasoning", None)
        if self.returns_thinking and thinking:
            sent["reasoning_content"] = thinking
        calls = sent.get("tool_calls") or []
        self.messages = [*self.messages, sent]
        for call in calls:
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": "picked"})
        if not calls:
            self.messages.append({"role": "user", "content": "go on"})

    def read(self, response: httpx.Response) -> tuple[dict[str, Any], str]:
        if not self.is_stream:
            (choice,) = response.json()["choices"]
            message = choice["message"]
            kept = {key: message[key] for key in ("role", "content", "reasoning") if message.get(key)}
            if message.get("tool_calls"):
                kept["tool_calls"] = message["tool_calls"]
            return {"content": "", **kept}, choice["art"]["id"]
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        identity = ""
        for line in response.text.splitlines():
            if not line.startswith("data: {"):
                continue
            for part in json.loads(line[6:])["choices"]:
                delta = part["delta"]
                message["content"] += delta.get("content") or ""
                if delta.get("reasoning"):
                    message["reasoning"] = message.get("reasoning", "") + delta["reasoning"]
                for call in delta.get("tool_calls") or ():
                    calls = message.setdefault("tool_calls", [])
                    if len(calls) <= call["index"]:
                        empty = {"name": "", "arguments": ""}
                        calls.append({"id": "", "type": "function", "function": empty})
                    whole_call = calls[call["index"]]
                    whole_call["id"] = call.get("id") or whole_call["id"]
                    for key, value in call["function"].items():
                        whole_call["function"][key] += value or ""
                identity = (part.get("art") or {}).get("id", identity)
        return message, identity


async def play_all(server: Server, model: str) -> list[list[Rollout]]:
    groups = [[Rollout(model, g, i) for i in range(GROUP_SIZE)] for g in range(NUM_GROUPS)]
    limits = httpx.Limits(max_connections=32)
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_SECONDS, limits=limits) as client:
        await asyncio.gather(*(rollout.play(client) for group in groups for rollout in group))
    return groups


def thoughts_in(text: str) -> set[str]:
    """The thinking of the finished turns in a prompt."""
    parts = [part.partition("</think>") for part in text.split("<think>")[1:]]
    return {thought.strip() for thought, mark, _ in parts if mark and thought.strip()}


def sampled_thought(text: str) -> set[str]:
    """The thinking of a sampled answer. A tool call ends it too, where the model forgot the mark."""
    thinking, mark, _ = text.replace("<tool_call>", "</think>").partition("</think>")
    return {thinking.strip()} if mark and thinking.strip() else set()


def test_no_rollout_is_sampled_behind_anothers_thinking(server: Server) -> None:
    register(server, "siblings")
    model = f"{PROJECT}/siblings"
    groups = asyncio.run(play_all(server, model))
    ledger, decoder = (
        Ledger(server.path / "art" / ".server" / "ledger.sqlite"),
        Decoder(TINY_DIR, []),
    )
    not_joined = num_thoughts = 0
    for group in groups:
        of_group: list[set[str]] = []
        for rollout in group:
            loaded = [ledger.find(identity) for identity in rollout.choice_ids]
            records: list[Record] = [record for record in loaded if record is not None]
            assert len(records) == NUM_TURNS
            own: set[str] = set()
            for turn, record in enumerate(records):
                assert thoughts_in(decoder.decode(record.prompt_token_ids)) <= own
                own |= sampled_thought(decoder.decode(record.token_ids))
                past = [*records[turn - 1].prompt_token_ids, *records[turn - 1].token_ids]
                if turn and record.prompt_token_ids[: len(past)] != past:
                    not_joined += 1
            of_group.append(own)
            num_thoughts += len(own)
        assert len(set().union(*of_group)) > 1, "siblings thought the same: the test would see nothing"
    ledger.close()
    assert num_thoughts > NUM_GROUPS * GROUP_SIZE
    bodies: list[dict[str, Any]] = []
    for group in groups:
        trajectories: list[dict[str, Any]] = []
        for index, rollout in enumerate(group):
            entries: list[Any] = [rollout.messages[0]]
            for turn, choice in enumerate(rollout.choices):
                entries.append(choice)
                if turn < NUM_TURNS - 1:
                    entries.append(rollout.messages[2 * turn + 2])
            trajectories.append({"messages_and_choices": entries, "tools": [PICK], "reward": float(index)})
        bodies.append({"trajectories": trajectories})
    with server.client() as client:
        done = train(client, "siblings", bodies)[-1]
    assert done["event"] == "done", done
    continuations = done["report"]["continuations"]
    assert sum(continuations.values()) == NUM_GROUPS * GROUP_SIZE * (NUM_TURNS - 1)
    assert sum(n for how, n in continuations.items() if how != "joined") == not_joined
    # Rollouts that return their thinking, or have a session, continue from their own tokens.
    assert continuations["joined"] >= NUM_GROUPS * GROUP_SIZE
