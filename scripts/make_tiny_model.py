"""Build the embedded default model `art/tiny` from nothing, and measure it.

    python scripts/make_tiny_model.py build      # half an hour on two idle cores; resumes after an interruption
    python scripts/make_tiny_model.py measure    # some minutes; writes the rates into the model card

The build learns a tokenizer from synthetic chats, trains a small Qwen3 on them for a fixed number of seeded steps, and
puts the files into the model folder. It needs a C++ compiler, for torch.compile. On cores shared with other work,
OMP_WAIT_POLICY=PASSIVE in the environment keeps the build from waiting in a busy loop. The parts live in
`scripts/tiny_model/`.
"""

import argparse
import os
import shutil
from pathlib import Path
from string import Template
from typing import cast

import art_server  # noqa: F401  # isort: skip - first, for torchvision
import torch
from tiny_model import games
from tiny_model.measuring import Sampler, measure, rates_table, yes_no_maybe_prompts
from tiny_model.tokenizer import build_tokenizer
from tiny_model.training import CHATS_PER_STEP, train
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen3ForCausalLM,
)

REPOSITORY = Path(__file__).parent.parent
NUM_STEPS = 3600
SEED = 0
SHARPNESS = 1.1
"""The factor on every logit, folded into the last norm: at temperature 1 the model answers as it
would at 1 / SHARPNESS, which spares the tail of words that a model this small cannot rule out."""
MEASURE_SEED = 1
MODEL_CARD_FILE = Path(__file__).parent / "tiny_model" / "model_card.md"


def build(seed: int, num_steps: int, work_dir: Path, model_dir: Path) -> None:
    """Train the model and put it into `model_dir`."""
    tokenizer = build_tokenizer(seed)
    model = train(tokenizer, seed, num_steps, work_dir)
    save_model(model, tokenizer, work_dir / "model", model_dir)


def save_model(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    staging_dir: Path,
    model_dir: Path,
) -> None:
    """Write the sharpened model in bfloat16 next to the work files, then move each file in place."""
    shutil.rmtree(staging_dir, ignore_errors=True)
    with torch.no_grad():
        model.model.norm.weight.mul_(SHARPNESS)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.to(torch.bfloat16).save_pretrained(staging_dir)  # type: ignore[arg-type]  # its wrapper takes self for an argument
    tokenizer.save_pretrained(staging_dir)
    model_dir.mkdir(parents=True, exist_ok=True)
    for file in staging_dir.iterdir():
        partial = model_dir / f".{file.name}.partial"
        shutil.copyfile(file, partial)
        os.replace(partial, model_dir / file.name)


def measure_and_write_card(seed: int, num_steps: int, model_dir: Path) -> None:
    """Measure the model in `model_dir`, print its rates, and write its card."""
    model = cast(Qwen3ForCausalLM, AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32))
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    rates = measure(Sampler(model, tokenizer), MEASURE_SEED)
    print(rates_table(rates))
    weights_size = (model_dir / "model.safetensors").stat().st_size
    card = Template(MODEL_CARD_FILE.read_text()).substitute(
        parameters=f"{model.num_parameters() / 1e6:.1f}",
        size=f"{weights_size / 1e6:.1f}",
        steps=f"{num_steps:,}",
        seed=seed,
        chats=CHATS_PER_STEP,
        layers=model.config.num_hidden_layers,
        width=model.config.hidden_size,
        vocabulary=f"{len(tokenizer):,}",
        sharpness=SHARPNESS,
        measure_seed=MEASURE_SEED,
        rates=rates_table(rates),
        **example_prompts(),
    )
    (model_dir / "README.md").write_text(card)


def example_prompts() -> dict[str, str]:
    """The card's examples, from the functions that made the training chats."""
    family = [prompt for prompt, words in yes_no_maybe_prompts() if len(words) == 3]
    board = {"B2": "x", "C1": "o"}
    rows = [[2, 4, 0, 0], [0, 16, 2, 0], [0, 0, 0, 8], [2, 0, 0, 0]]
    blocks = {
        "yes_no_maybe_prompt": "\n".join(family[::31][:4]),
        "tictactoe_prompt": f"{games.tictactoe_system()}\n\n{games.tictactoe_turn(board, 'x')}",
        "game_2048_prompt": f"{games.game_2048_system()}\n\n{games.game_2048_turn(rows)}",
    }
    return {name: f"```\n{block}\n```" for name, block in blocks.items()}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("build", "measure"))
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--work-dir", type=Path, default=REPOSITORY / ".build" / "tiny")
    parser.add_argument("--model-dir", type=Path, default=REPOSITORY / "art_server" / "tiny_model")
    arguments = parser.parse_args()
    if arguments.command == "build":
        build(arguments.seed, arguments.steps, arguments.work_dir, arguments.model_dir)
    else:
        measure_and_write_card(arguments.seed, arguments.steps, arguments.model_dir)


if __name__ == "__main__":
    main()
