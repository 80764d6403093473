"""All kinds of sampling train without bias: engine and trainer agree on the log-probability of each sampled token.

Both run in float32, so that only the distribution can make a difference.
"""

import concurrent.futures
import itertools
from typing import Any

import httpx

from tests.live import PROJECT, Server, register, train

GUESS = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Make a guess.",
        "parameters": {
            "type": "object",
            "properties": {
                "number": {"type": "integer"},
                "color": {"type": "string", "enum": ["red", "green", "blue"]},
            },
            "required": ["number", "color"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
STRICT = {"tools": [GUESS], "tool_choice": "required"}
SCHEMA = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {
            "name": "answer",
            "strict": True,
            "schema": {
                "type": "object",
                "properties": {"word": {"enum": ["yes", "no", "maybe"]}, "sure": {"type": "boolean"}},
                "required": ["word", "sure"],
                "additionalProperties": False,
            },
        },
    }
}
SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature 0.3": {"temperature": 0.3},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1.3": {"temperature": 1.3},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 20},
    "min_p": {"min_p": 0.1},
    "strict tools": STRICT,
    "schema": SCHEMA,
    "bias": {"logit_bias": {"5": 2.0, "100": -3.0}},
    "joined": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.02},
    "joined, tools": {"temperature": 1.3, "top_p": 0.8, "top_k": 20, **STRICT},
    "joined, schema": {"temperature": 0.7, "min_p": 0.1, **SCHEMA},
}
NUM_GROUPS, GROUP_SIZE = 3, 8
QUESTIONS = ("respond with yes, no, maybe", "Say something nice about the sea.", "What is 2 plus 3?")


def roll_out(client: httpx.Client, name: str, sampling: dict[str, Any]) -> list[dict[str, Any]]:
    """Groups of answers with different rewards, independent of the texts."""
    groups = []
    for question in QUESTIONS[:NUM_GROUPS]:
        messages = [{"role": "user", "content": question}]
        body = {"model": f"{PROJECT}/{name}", "messages": messages, "max_tokens": 40}
        response = client.post("/v1/chat/completions", json=body | {"n": GROUP_SIZE} | sampling)
        assert response.status_code == 200, response.text
        choices = response.json()["choices"]
        trajectories = [
            {"messages_and_choices": [*messages, choice], "tools": sampling.get("tools"), "reward": float(index % 3)}
            for index, choice in enumerate(choices)
        ]
        groups.append({"trajectories": trajectories})
    return groups


def assert_scored_as_sampled(client: httpx.Client, name: str) -> None:
    """Samples groups of all kinds in one batch, trains on them in one step, and checks the report."""
    with concurrent.futures.ThreadPoolExecutor(len(SAMPLING)) as pool:
        kinds = pool.map(lambda sampling: roll_out(client, name, sampling), SAMPLING.values())
        groups = [*itertools.chain.from_iterable(kinds)]
    done = train(client, name, groups, learning_rate=1e-3)[-1]
    assert done["event"] == "done", done
    metrics, report = done["metrics"], done["report"]
    assert metrics["data/step_num_tokens_without_logprob"] == 0
    assert metrics["loss/logprob_gap_num_tokens"] == report["num_trained_tokens"]
    assert metrics["loss/logprob_gap_max"] < 1e-3
    assert report["num_trajectories_trained"] == len(SAMPLING) * NUM_GROUPS * GROUP_SIZE, report


def check_all_kinds(server: Server, base_model: str) -> None:
    """At step 0, and by an adapter of five steps."""
    name = f"sampled-{base_model.replace('/', '-')}"
    with server.client() as client:
        register(server, name, base_model=base_model)
        assert_scored_as_sampled(client, name)
        for _ in range(4):
            groups = roll_out(client, name, {})
            assert train(client, name, groups, learning_rate=1e-3)[-1]["event"] == "done"
        assert_scored_as_sampled(client, name)


def check_gspo_with_strict_tools(server: Server, base_model: str) -> None:
    name = f"gspo-tools-{base_model.replace('/', '-')}"
    with server.client() as client:
        register(server, name, base_model=base_model)
        groups = roll_out(client, name, STRICT)
        response = client.post(
            f"/api/models/{PROJECT}/{name}/train",
            json={"groups": groups, "config": {"preset": "gspo", "correction": "sequence_mask"}},
        )
        done = httpx.Response(200, text=response.text.splitlines()[-1]).json()
    assert done["event"] == "done"
    assert done["metrics"]["loss/logprob_gap_max"] < 1e-3, "as in a step that has no other kinds"
    assert done["metrics"]["loss/corrected_token_fraction"] == 0
    assert done["metrics"]["loss/clipped_token_fraction"] == 0
    assert done["report"]["num_trajectories_trained"] == NUM_GROUPS * GROUP_SIZE
