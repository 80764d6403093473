"""Measures the ledger over many completions: memory, look-up, restart, disk.

    python scripts/bench/ledger.py [--completions 100000]

Records conversations of 20 turns, then of one turn, with the embedded model's tokenizer and splicing on. Prints one JSON
line: the slope of the resident memory (bytes per record, least squares over the second half), the median and 99th
percentile of a look-up by choice id (in ms, including the assembly of the prompt from its parts), the seconds of a
restart, and the bytes on disk per completion for both kinds.
"""

import argparse
import json
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from art_server.ledger import conversation
from art_server.ledger.conversation import PastAnswer
from art_server.ledger.decoder import Decoder
from art_server.ledger.ledger import Ledger
from art_server.ledger.records import Request
from art_server.shared.engine_messages import FinishedChoice
from art_server.store.base_facts import read_facts
from art_server.store.base_models import TINY_DIR

PROMPT_TOKENS = 200
QUESTION_TOKENS = 30
ANSWER_TOKENS = 50


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def record(
    ledger: Ledger,
    number: int,
    rendered: list[int],
    answer: list[int],
    answers: Sequence[PastAnswer],
) -> tuple[list[int], PastAnswer]:
    """Records one completion; returns prompt and answer, with which the next turn's prompt begins, and its digests."""
    question = str(number).encode()
    prefix = conversation.digest(answers[-1].answer_digest if answers else b"", question)
    request = Request(*(f"{number:032x}", "chat", 1, 0, "me", None, prefix), answers=answers)
    with ledger.open_request(request) as opened:
        prompt = ledger.take_prompt(request.request_id, 0, rendered) or rendered
        logprobs = [-random.random() * 3 for _ in answer]
        sample = FinishedChoice("x", 0, "", answer, logprobs, "stop", None, {"n": 1, "temperature": 1.0})
        ledger.take_samples([(request.request_id, 0, 0, sample)])
        past_answer = PastAnswer(prefix, opened.records[0].answer_digest)
    ledger.mark_delivered(request.request_id)
    return prompt + answer, past_answer


def converse(ledger: Ledger, count: int, turns: int, end: int, first: int) -> list[tuple[int, int]]:
    """Record `count` completions in conversations of `turns`; returns (records, resident bytes) along the way."""
    memory: list[tuple[int, int]] = []
    so_far: list[int] = []
    answers: list[PastAnswer] = []
    for i in tqdm(range(count), desc=f"{turns} turns"):
        if i % turns == 0:
            so_far, answers = [random.randrange(100, 1000) for _ in range(PROMPT_TOKENS)], []
        else:
            so_far = so_far + [random.randrange(100, 1000) for _ in range(QUESTION_TOKENS)]
        answer = [random.randrange(100, 1000) for _ in range(ANSWER_TOKENS - 1)] + [end]
        so_far, past = record(ledger, first + i, so_far, answer, answers)
        answers.append(past)
        if i % 500 == 0:
            memory.append((i, resident_bytes()))
    return memory


def slope(points: list[tuple[int, int]]) -> float:
    """Least-squares slope over the second half."""
    late = points[len(points) // 2 :]
    return statistics.linear_regression([x for x, _ in late], [y for _, y in late]).slope


def disk_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--completions", type=int, default=100_000)
    count = parser.parse_args().completions
    random.seed(0)
    decoder = Decoder(TINY_DIR, read_facts(TINY_DIR).stop_ids)
    end = decoder.end_id
    assert end is not None
    with tempfile.TemporaryDirectory() as single, tempfile.TemporaryDirectory() as many:
        ledger = Ledger(Path(many) / "l.sqlite")
        ledger.use_tokenizer(TINY_DIR, read_facts(TINY_DIR))
        memory = converse(ledger, count, 20, end, 0)
        wanted = [f"{random.randrange(count):032x}-0" for _ in range(1000)]
        times = []
        for name in wanted:
            started = time.perf_counter()
            assert ledger.find(name) is not None
            times.append((time.perf_counter() - started) * 1000)
        ledger.close()
        started = time.perf_counter()
        Ledger(Path(many) / "l.sqlite").close()
        restart = time.perf_counter() - started
        one = Ledger(Path(single) / "l.sqlite")
        one.use_tokenizer(TINY_DIR, read_facts(TINY_DIR))
        few = max(1000, count // 10)
        converse(one, few, 1, end, 0)
        one.close()
        times.sort()
        print(
            json.dumps(
                {
                    "completions": count,
                    "memory_slope_bytes_per_record": round(slope(memory), 1),
                    "lookup_median_ms": round(statistics.median(times), 3),
                    "lookup_p99_ms": round(times[int(len(times) * 0.99)], 3),
                    "restart_seconds": round(restart, 2),
                    "disk_bytes_per_completion_20_turns": round(disk_bytes(Path(many)) / count),
                    "disk_bytes_per_completion_1_turn": round(disk_bytes(Path(single)) / few),
                }
            )
        )


if __name__ == "__main__":
    main()
