"""A user's program that samples from one model and trains it, without any code for killed processes.

    python -m tests.long.chaos.client URL NAME FOLDER

Trains until FOLDER/stop exists, and appends each step with two of its answers to FOLDER/NAME.jsonl. A program that was killed
is started again with the same arguments.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import openai

import art

PROJECT = "chaos"
PATIENCE_SECONDS = 3600.0
PROMPTS = ("respond with yes, no, maybe", "respond with maybe, no, yes")
KEPT_TOKENS = 6


async def rollout(model: art.TrainableModel, prompt: str, seen: list[dict[str, Any]]) -> art.Trajectory:
    client: openai.AsyncOpenAI = model.openai_client()
    message: Any = {"role": "user", "content": prompt}
    completion = await client.chat.completions.create(
        model=model.get_inference_name(), messages=[message], max_tokens=KEPT_TOKENS, logprobs=True
    )
    (choice,) = completion.choices
    extra: dict[str, Any] = choice.model_extra or {}
    entries = choice.logprobs.content if choice.logprobs and choice.logprobs.content else []
    seen.append(
        {
            "step": extra["art"]["step"],
            "prompt": extra.get("prompt_token_ids"),
            "tokens": extra.get("token_ids"),
            "logprobs": [entry.logprob for entry in entries],
        }
    )
    reward = len(set(choice.message.content or "")) / 10
    return art.Trajectory(messages_and_choices=[message, choice], reward=reward)


async def main(url: str, name: str, folder: Path) -> None:
    backend = art.Backend(url, reconnect_seconds=PATIENCE_SECONDS)
    model = art.TrainableModel(name=name, project=PROJECT, base_model="art/tiny")
    await model.register(backend)
    config = art.TrainConfig(learning_rate=2e-4)
    with open(folder / f"{name}.jsonl", "a", buffering=1) as log:  # noqa: ASYNC230 - one line per step
        while not (folder / "stop").exists():
            seen: list[dict[str, Any]] = []
            groups = await art.gather_trajectory_groups(
                art.TrajectoryGroup(rollout(model, prompt, seen) for _ in range(4)) for prompt in PROMPTS
            )
            result = await model.train(groups, config=config)
            log.write(json.dumps({"step": result.step, "answers": seen[:2]}) + "\n")
    await backend.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
