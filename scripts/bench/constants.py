"""Measures the constants of scripts/capacity that no other benchmark prints: the ledger's bytes, and commits of the jobs' table.

    python scripts/bench/constants.py [--completions 2000] [--commits 500] [--folder FOLDER]

The ledger records a number of completions and twice this number, with short and long prompts and answers. Bytes for a
completion, a prompt token and a sampled token are fitted to the growth of the ledger's files by least squares. Commits
are inserted jobs, each synced to the disk of FOLDER (default: the temporary folder). Prints one JSON line.
"""

import argparse
import itertools
import json
import random
import tempfile
import time
from pathlib import Path

import numpy as np
from ledger import disk_bytes, record

from art_protocol.wire import JobReport, LoRAConfig, TrainConfig
from art_server.jobs.job_row import Payload
from art_server.jobs.queue import JobQueue
from art_server.ledger.decoder import Decoder
from art_server.ledger.ledger import Ledger
from art_server.shared.trainer_messages import Batch
from art_server.store.base_facts import read_facts
from art_server.store.base_models import TINY_DIR
from art_server.store.model_folder import ModelRecord
from art_server.store.model_table import ModelTable
from art_server.store.server_database import open_server_database

PROMPTS, ANSWERS = (50, 800), (20, 300)
"""Lengths in tokens."""
VOCABULARY = 150_000
"""Bound of the prompts' token ids: they take as many bytes as the ids of large models."""


def bytes_on_disk(folder: Path, prompt: int, answer: int, count: int) -> int:
    facts = read_facts(TINY_DIR)
    end = Decoder(TINY_DIR, facts.stop_ids).end_id
    assert end is not None
    ledger = Ledger(folder / "l.sqlite")
    ledger.use_tokenizer(TINY_DIR, facts)
    for number in range(count):
        asked = [random.randrange(100, VOCABULARY) for _ in range(prompt)]
        said = [random.randrange(100, 1000) for _ in range(answer - 1)]
        record(ledger, number, asked, [*said, end], [])
    ledger.close()
    return disk_bytes(folder)


def ledger_constants(folder: Path, count: int) -> dict[str, float]:
    cells = list(itertools.product(PROMPTS, ANSWERS))
    sizes: list[float] = []
    for prompt, answer in cells:
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            whole = bytes_on_disk(Path(temporary), prompt, answer, 2 * count)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            sizes.append((whole - bytes_on_disk(Path(temporary), prompt, answer, count)) / count)
    known = np.array([[1, prompt, answer] for prompt, answer in cells], dtype=float)
    fitted = np.linalg.lstsq(known, np.array(sizes), rcond=None)[0]
    names = ("ledger_bytes_per_completion", "ledger_bytes_per_prompt_token", "ledger_bytes_per_sampled_token")
    return {name: round(float(value), 1) for name, value in zip(names, fitted, strict=True)}


def commits_per_second(folder: Path, count: int) -> float:
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        database = open_server_database(Path(temporary))
        record = ModelRecord(name="a", project="p", base_model="base", lora=LoRAConfig())
        model = ModelTable(database).add(record)
        queue = JobQueue(database, max_queued=count)
        payload = Payload.make(Batch(groups=[]))
        started = time.perf_counter()
        for number in range(count):
            queue.insert(model, str(number), "digest", TrainConfig(), payload, JobReport())
        seconds = time.perf_counter() - started
        database.close()
    return round(count / seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--completions", type=int, default=2000, help="of each of four kinds")
    parser.add_argument("--commits", type=int, default=500)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk that is measured")
    flags = parser.parse_args()
    random.seed(0)
    constants = ledger_constants(flags.folder, flags.completions)
    print(json.dumps(constants | {"commits_per_second": commits_per_second(flags.folder, flags.commits)}))


if __name__ == "__main__":
    main()
