"""A program that test_nat.py runs in .venv-nat: the plugin's adapter trains on answers, then on episodes with tools.

    python nat_adapter.py URL

Prints one JSON line for the result of each training.
"""

import asyncio
import sys
from typing import Any
from urllib.parse import urlsplit

import openai
from nat.data_models.finetuning import EpisodeItem, EpisodeItemRole, FinetuneConfig, Trajectory, TrajectoryCollection
from nat.plugins.openpipe.config import ARTBackendConfig, ARTTrainerAdapterConfig
from nat.plugins.openpipe.trainer_adapter import ARTTrainerAdapter

NAME = "nat-adapter"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def assistant(choice: Any) -> EpisodeItem:
    """The choice as the plugin's trajectory builder keeps it: without ids and tool calls."""
    return EpisodeItem(
        role=EpisodeItemRole.ASSISTANT, content=choice.message.content or "", logprobs=choice.logprobs.model_dump()
    )


async def chat(client: openai.AsyncOpenAI, messages: list[Any], **more: Any) -> Any:
    completion = await client.chat.completions.create(
        model=NAME, messages=messages, max_tokens=64, logprobs=True, top_logprobs=1, **more
    )
    return completion.choices[0]


async def answer_episode(client: openai.AsyncOpenAI) -> list[EpisodeItem]:
    text = "respond with yes, no, maybe"
    choice = await chat(client, [{"role": "user", "content": text}])
    return [EpisodeItem(role=EpisodeItemRole.USER, content=text), assistant(choice)]


async def tool_episode(client: openai.AsyncOpenAI) -> list[EpisodeItem]:
    """One episode: a call of the tool, if the model makes one, and the answer after its result."""
    text = "What is 12 plus 30?"
    messages: list[Any] = [{"role": "user", "content": text}]
    choice = await chat(client, messages, tools=[ADD])
    episode = [EpisodeItem(role=EpisodeItemRole.USER, content=text), assistant(choice)]
    calls = choice.message.tool_calls
    if calls and len(calls) == 1:
        messages.append(choice.message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": calls[0].id, "content": "42"})
        episode.append(EpisodeItem(role=EpisodeItemRole.TOOL, content="42"))
        episode.append(assistant(await chat(client, messages, tools=[ADD])))
    return episode


async def main(url: str) -> None:
    backend = ARTBackendConfig(
        ip=str(urlsplit(url).hostname),
        port=urlsplit(url).port or 0,
        name=NAME,
        project="tests",
        base_model="art/tiny",
        delete_old_checkpoints=True,
    )
    config = ARTTrainerAdapterConfig(backend=backend, training={"learning_rate": "2e-4"})
    adapter = ARTTrainerAdapter(config)
    await adapter.initialize(FinetuneConfig())
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="default") as client:
        for number, run in enumerate((answer_episode, tool_episode)):
            episodes = [await run(client) for _ in range(4)]
            group = [Trajectory(episode=episode, reward=float(index)) for index, episode in enumerate(episodes)]
            collection = TrajectoryCollection(trajectories=[group], run_id=f"run-{number}")
            job = await adapter.submit(collection)
            status = await adapter.wait_until_complete(job, poll_interval=0.1)
            print(status.model_dump_json(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
