"""Repeats chaos runs until the file of results contains enough kills; each run appends one line."""

import argparse
import json
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.long.chaos.chaos import Chaos, Places

KILLS_A_RUN = 30
"""After this number of kills everything is checked, and the next run begins in an empty folder."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill a server's processes while two programs train on it.")
    parser.add_argument("--kills", type=int, default=300, help="total over all runs in the file")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="seed of the first run")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no kill after this time")
    parser.add_argument("--file", type=Path, default=Path("docs/chaos.jsonl"))
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--cluster", choices=["auto"], help="Ray places engines and ranks")
    parser.add_argument("--hosts", type=int, default=0, help="`art-server host`, each with an engine and a rank")
    flags = parser.parse_args()
    deadline = time.monotonic() + 60 * flags.minutes
    seed = flags.seed
    while (left := flags.kills - num_kills(flags.file)) > 0 and time.monotonic() < deadline:
        folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        print(f"seed {seed}, in {folder}, {left} kills to go", flush=True)
        places = Places(flags.engines, flags.ranks, flags.cluster, flags.hosts)
        chaos = Chaos(folder, seed, lambda text: print(text, flush=True), places)
        figures = chaos.run(min(left, KILLS_A_RUN), deadline - time.monotonic())
        with open(flags.file, "a") as results:
            results.write(json.dumps({"seed": seed, **figures}) + "\n")
        print(json.dumps(figures), flush=True)
        shutil.rmtree(folder)
        seed += 1
    print(table(flags.file))


def num_kills(file: Path) -> int:
    return sum(row["kills"] for row in read(file))


def read(file: Path) -> list[dict[str, int]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def table(file: Path) -> str:
    """A Markdown table of the runs' figures, added up."""
    total: Counter[str] = Counter()
    for row in read(file):
        total.update({key: value for key, value in row.items() if key != "seed"})
    return "\n".join(f"| {key} | {value} |" for key, value in total.items())


if __name__ == "__main__":
    main()
