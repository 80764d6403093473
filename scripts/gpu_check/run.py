"""Runs the checks, and keeps a line for each case."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import arms
import torch

from gpu_check.block_mask import block_mask
from gpu_check.compiles import compiles
from gpu_check.equality import equality
from gpu_check.lora import lora
from gpu_check.machine import ROOT, Cases, Line, Machine
from gpu_check.memory import memory
from gpu_check.published import models
from gpu_check.ranks import ranks
from gpu_check.retry import retry
from gpu_check.served import fleet, learns, served
from gpu_check.transfer import transfer
from gpu_check.trees import trees
from gpu_check.trl import trl
from gpu_check.unsloth import be_unsloth, unsloth
from gpu_check.walk import walk

CHECKS: dict[str, Callable[[Machine], Cases]] = {
    "equality": equality,
    "compiles": compiles,
    "memory": memory,
    "block_mask": block_mask,
    "lora": lora,
    "trees": trees,
    "trl": trl,
    "walk": walk,
    "transfer": transfer,
    "retry": retry,
    "unsloth": unsloth,
    "models": models,
    "learns": learns,
    "served": served,
    "ranks": ranks,
    "fleet": fleet,
}


def main() -> None:
    if sys.argv[1:2] == ["--as-unsloth"]:
        be_unsloth(Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description="checks that need a GPU")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "gpu.jsonl")
    parser.add_argument("--only", default=",".join(CHECKS))
    parser.add_argument("--seconds", type=float, default=570.0, help="begin no check later")
    parser.add_argument("--models", action="store_true", help="models, learns and served only")
    parser.add_argument("--scale", action="store_true", help="ranks and fleet only")
    parser.add_argument("--server-flags", default="", help="more flags for art-server")
    parser.add_argument("--folder", type=Path, default=ROOT / ".build" / "gpu-check")
    parser.add_argument("--toy", action="store_true", help="tiny models, for a CPU")
    flags = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    machine = Machine(flags.toy, flags.folder, flags.server_flags.split())
    if not (machine.is_gpu or flags.toy):
        sys.exit("gpu-check needs CUDA, which torch does not find here; --toy runs it on a CPU")
    started = time.monotonic()
    if flags.models:
        names = "models,learns,served"
    else:
        names = "ranks,fleet" if flags.scale else flags.only
    for check in names.split(","):
        for case, measure in CHECKS[check](machine):
            if not has_line(flags.out, machine, check, case) and time.monotonic() - started < flags.seconds:
                run_one(flags.out, machine, check, case, measure)
    failed = [line for line in read_lines(flags.out) if line["ok"] is False]
    print(
        f"{len(failed)} findings are not ok: {[(line['check'], line['case']) for line in failed]}",
        file=arms.answers,
    )


def run_one(out: Path, machine: Machine, check: str, case: str, measure: Callable[[], Line]) -> None:
    line: Line = {"device": machine.name, "torch": torch.__version__, "check": check, "case": case}
    begun = time.monotonic()
    try:
        line |= measure()
    except Exception as error:  # one failed check must not stop the next ones
        line |= {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
    line["whole_s"] = round(time.monotonic() - begun, 1)
    text = json.dumps(line)
    print(text, file=arms.answers, flush=True)
    with out.open("a") as file:
        file.write(text + "\n")
    if machine.is_gpu:
        torch.cuda.empty_cache()


def read_lines(out: Path) -> list[Line]:
    return [json.loads(text) for text in out.read_text().splitlines()] if out.exists() else []


def has_line(out: Path, machine: Machine, check: str, case: str) -> bool:
    wanted = (machine.name, check, case)
    return any((line["device"], line["check"], line["case"]) == wanted for line in read_lines(out))
