"""Ten steps of models as published, the whole class, and trees against single sequences."""

import functools
import shutil
import statistics
import time
from pathlib import Path

import arms
import torch

from art_protocol.wire import LoRAConfig
from art_server.store.base_models import TINY_DIR
from art_server.trainer.policy import Policy
from gpu_check.machine import BARS, GIB, Cases, Line, Machine, distance, step_gradient

VISION = {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16}
PUBLISHED: dict[str, Line] = {
    "Qwen3.5-4B": {
        "model_type": "qwen3_5",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 9216,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
        "vision_config": {"out_hidden_size": 2560, "depth": 24, "hidden_size": 1024} | {"intermediate_size": 4096},
        "tie_word_embeddings": True,
    },
    "Gemma 3 4B": {
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10_240,
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
        "vision_config": VISION | {"image_size": 896, "num_hidden_layers": 27, "patch_size": 14},
    },
}
"""The sizes in config.json of Qwen/Qwen3.5-4B and google/gemma-3-4b-it; transformers has the sizes that these files leave out."""
TOY_TEXT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 2048}
TOY_VISION = {"hidden_size": 32, "intermediate_size": 64, "depth": 1, "num_hidden_layers": 1}
NUM_STEPS = 10


def models(machine: Machine) -> Cases:
    for name in PUBLISHED:
        yield name, functools.partial(_models, machine, name)


def _models(machine: Machine, name: str) -> Line:
    policy = Policy(str(published_folder(machine, name)), machine.dtype)
    policy.init_adapter(LoRAConfig(), 1)
    chance = torch.Generator(policy.device).manual_seed(2)
    for key, parameter in policy.parameters.items():
        if "lora_B" in key:
            parameter.data.normal_(std=0.02, generator=chance)
    vocabulary = policy.model.get_input_embeddings().num_embeddings
    groups = machine.groups({"vocab": vocabulary}, machine.cell(prompt=1024, completion=256))
    computed, _ = step_gradient(policy, groups, 0)
    policy.use_trees(False)
    expected, _ = step_gradient(policy, groups, 0)
    rows = machine.timed(arms.prepare_step(policy, groups, 0))
    policy.use_trees(True)
    take_step = arms.prepare_step(policy, groups, 0)
    seconds: list[float] = []
    metrics: Line = {}
    for _ in range(NUM_STEPS):
        machine.synchronize()
        started = time.perf_counter()
        metrics = take_step()
        machine.synchronize()
        seconds.append(time.perf_counter() - started)
    apart, ours = distance(computed, expected), statistics.median(seconds[1:])
    return {
        "parameters": policy.num_parameters,
        "trained_matrices": len(policy.parameters),
        "first_step_s": seconds[0],
        "seconds": {"ours": ours, "rows": rows},
        "ratio": rows / ours,
        "peak_gib": machine.peak(take_step) / GIB,
        "is_shared": bool(metrics["data/step_is_shared"]),
        "gradient_distance": apart,
        "grad_norm": metrics["loss/grad_norm"],
        "ok": machine.ok(apart < BARS[machine.dtype] and ours < rows),
    }


def published_folder(machine: Machine, name: str) -> Path:
    """The files of a model as published, with random weights and the tokenizer of art/tiny."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    folder = machine.models / f"{name.replace(' ', '-')}{machine.suffix}"
    if (folder / "done").exists():
        return folder
    settings = dict(PUBLISHED[name])
    if machine.is_toy:
        settings["text_config"] = settings["text_config"] | TOY_TEXT
        settings["vision_config"] = settings["vision_config"] | TOY_VISION
        settings["vision_config"]["out_hidden_size"] = TOY_TEXT["hidden_size"]
    config = AutoConfig.for_model(**settings)
    torch.manual_seed(0)
    with torch.device(machine.device):
        model = AutoModelForImageTextToText.from_config(config, dtype=machine.dtype)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (TINY_DIR / name).exists():
            shutil.copy(TINY_DIR / name, folder)
    (folder / "done").touch()
    return folder
