"""32 models of ranks 1 to 64 in four projects on one server whose engine holds four adapters at a time. One project queues forty
heavy jobs; the others train at their fair time. Real vLLM and trainer."""

import asyncio
import random
import sqlite3
from pathlib import Path

import pytest

import art
from tests.live import Server

pytestmark = pytest.mark.anyio

RANKS = (1, 2, 4, 8, 16, 32, 48, 64)
PROJECTS = ("heavy", "a", "b", "c")
NUM_HEAVY = 40
"""Jobs that the first project queues before the others queue theirs."""
MOST_SHARE = 1.2


async def sample(model: art.TrainableModel, num: int) -> art.TrajectoryGroup:
    """A group whose rewards differ. A model that is not found is an error."""

    async def rollout(number: int) -> art.Trajectory:
        messages: art.Messages = [{"role": "user", "content": "respond with yes, no, maybe"}]
        completion = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=messages, max_tokens=8
        )
        return art.Trajectory(messages_and_choices=[*messages, completion.choices[0]], reward=number / num)

    return art.TrajectoryGroup(await asyncio.gather(*(rollout(number) for number in range(num))))


async def test_many_models_serve_and_no_project_waits_for_anothers_queue(tmp_path: Path) -> None:
    flags = ["--base-model", "art/tiny", "--max-lora-rank", "64", "--max-loras", "4"]
    with Server(tmp_path, arguments=flags).running() as server:
        async with art.Backend(server.url) as backend:
            models = [
                art.TrainableModel(
                    name=f"of-rank-{rank}", project=project, base_model="art/tiny", lora=art.LoRAConfig(rank=rank)
                )
                for project in PROJECTS
                for rank in RANKS
            ]
            for model in models:
                await model.register(backend)
            rounds = models * 3
            random.Random(1).shuffle(rounds)
            for start in range(0, len(rounds), 16):  # each adapter is evicted, and comes back
                await asyncio.gather(*(sample(model, 2) for model in rounds[start : start + 16]))

            heavy = [model for model in models if model.project == "heavy"]
            groups = {model.name: [await sample(model, 16) for _ in range(4)] for model in heavy}
            light = {id(model): await sample(model, 16) for model in models if model.project != "heavy"}
            jobs = [
                await heavy[number % len(heavy)].submit(groups[heavy[number % len(heavy)].name])
                for number in range(NUM_HEAVY)
            ]
            others = [model for model in models if model.project != "heavy"]
            jobs += [await model.submit([light[id(model)]]) for model in others]
            results = [await job for job in jobs]
            assert len(results) == NUM_HEAVY + len(others)
            assert all([await model.get_step() == 1 for model in others])
        check_order(tmp_path / "art" / ".server" / "server.sqlite")


def check_order(table: Path) -> None:
    """Each job of the other projects ended within twice its fair time, in tokens, and the heavy project had no more than its share
    while others waited."""
    with sqlite3.connect(table) as database:
        rows = database.execute(
            "SELECT project, num_tokens, created_at, finished_at FROM jobs JOIN models USING (model) ORDER BY finished_at"
        ).fetchall()
    last_accepted = max(created for project, _, created, _ in rows if project != "heavy")
    rows = [(project, tokens) for project, tokens, _, finished in rows if finished > last_accepted]
    largest = max(tokens for _, tokens in rows)
    passed, own = 0, dict.fromkeys(PROJECTS, 0)
    for index, (project, tokens) in enumerate(rows):
        passed, own[project] = passed + tokens, own[project] + tokens
        if project == "heavy":
            continue
        # Its own tokens and as many of each other project, behind the job that ran when it came.
        fair = len(PROJECTS) * own[project] + largest
        assert passed <= 2 * fair, (index, project, passed, fair)
    waiting_until = max(index for index, (project, _) in enumerate(rows) if project != "heavy")
    while_others = [(project, tokens) for project, tokens in rows[: waiting_until + 1]]
    of_heavy = sum(tokens for project, tokens in while_others if project == "heavy")
    total = sum(tokens for _, tokens in while_others)
    print(f"heavy: {of_heavy} of {total} tokens while others waited; its largest job has {largest}")
    assert of_heavy <= MOST_SHARE * total / len(PROJECTS) + largest
