"""Scores of a demo's model in the database of its server, and the releases that they decided."""

import contextlib
import json
import random
from pathlib import Path

from art_server.shared import clock
from art_server.store.database import insert
from art_server.store.model_folder import ModelFolder
from art_server.store.model_table import ModelTable
from art_server.store.server_database import open_server_database

DAY = 86400.0
NAMES = {"thumb": 0.3, "tests": 0.1}
"""The mean value of each name's scores at step 0, which grows by .025 a step."""
RELEASES = (
    (
        "promoted",
        0,
        4,
        "the canary is better: step 4 earned 0.482 from 190 users and step 0 0.391 from 402 users (z 2.9)",
    ),
    (
        "rolled_back",
        4,
        8,
        "the canary is not better: step 8 earned 0.391 from 64 users and step 4 0.522 from 151 users (z -2.6)",
    ),
    (
        "promoted",
        4,
        12,
        "the canary is better: step 12 earned 0.598 from 233 users and step 4 0.517 from 511 users (z 2.7)",
    ),
    ("canary", 12, 16, None),
)


def make_scores(
    root: Path, folder: ModelFolder, number: int = 2000, steps: int = 16, choice: str | None = None
) -> None:
    """Adds `number` scores of the model's answers from ten days, the newest of this choice, and its releases."""
    numbers, now = random.Random(0), clock.now()
    with contextlib.closing(open_server_database(root)) as database, database.changes("scores") as connection:
        model = next(row.model for row in ModelTable(database).rows() if row.folder == folder.name)
        for index in range(number):
            step = index * steps // number
            name = numbers.choice(list(NAMES))
            created_at = now - 10 * DAY * (1 - index / number)
            answer = f"{numbers.getrandbits(128):032x}-0"
            if index == number - 1 and choice is not None:
                answer = choice
            row = {
                "score_id": f"F{index}",
                "model": model,
                "target": f"answer {answer}",
                "choices": json.dumps([answer]),
                "step": step,
                "user": f"{numbers.getrandbits(128):032x}",
                "owner": "anyone",
                "name": name,
                "value": float(numbers.random() < NAMES[name] + 0.025 * step),
                "texts": json.dumps({"comment": None}),
                "digest": "",
                "answered_at": created_at - numbers.expovariate(1 / 1200),
                "created_at": created_at,
                "state": "trained" if index < number - 61 else "scored",
            }
            insert(connection, "scores", row)
        for index, (state, incumbent, step, reason) in enumerate(RELEASES):
            at = now - (8 - 2 * index) * DAY
            row = {"model": model, "state": state, "incumbent": incumbent, "passed": step, "candidate": step}
            ended = {"ended_at": None if state == "canary" else at + DAY}
            insert(connection, "releases", row | {"reason": reason, "began_at": at, "split_at": at} | ended)
