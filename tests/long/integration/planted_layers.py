"""A program of test_families.py: plants adapters on layers that vLLM folds into others, and compares each kind of layer of
the model with the engine, as the check of layers does before a base's first job. Then it changes one of the adapters that
agree, and compares it again. It prints two JSON objects: what is wrong with each kind, and with each change."""

import dataclasses
import itertools
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from art_server.shared.same_policy import find_fault, mismatch_limits
from art_server.shared.trainer_messages import Probe
from art_server.store.adapter_layers import Layers
from art_server.trainer import base as trainer_base
from art_server.trainer.policy import Policy
from art_server.trainer.probe import write_layer_probes
from tests.long.integration.family_engine import LORA, score, start_engine
from tests.makers.toy_models import make_model

CHANGED = "self_attn.o_proj"
CHANGES = ("alpha", "layer numbers", "tower")
numbers = itertools.count(1)
LIMITS = mismatch_limits(("float32", "float32"))


def main() -> None:
    family = sys.argv[1]
    find_layers = trainer_base.find_layers

    def with_folded(model: PreTrainedModel) -> Layers:
        family_layers = find_layers(model)
        shapes = family_layers.shapes | dict.fromkeys(family_layers.folded, (0, 0))
        return dataclasses.replace(family_layers, shapes=shapes, folded=())

    trainer_base.find_layers = with_folded
    with tempfile.TemporaryDirectory() as folder:
        base, adapters = make_model(family, Path(folder) / "base"), Path(folder) / "adapters"
        adapters.mkdir()
        assert LIMITS is not None
        probes = write_layer_probes(Policy(str(base)), LORA, adapters, LIMITS)
        for change in CHANGES:
            write_changed(adapters / CHANGED, adapters / change, change)
        engine = start_engine(family, base, "float32")
        kinds = {kind: compare(engine, probe, adapters / kind) for kind, probe in probes.items()}
        changes = {change: compare(engine, probes[CHANGED], adapters / change) for change in CHANGES}
        changes["base"] = compare(engine, probes[CHANGED], None)
        print(json.dumps(kinds))
        print(json.dumps(changes))


def compare(engine: Any, probe: Probe, adapter: Path | None) -> str | None:
    """What is wrong with the engine's log-probabilities. Any: vLLM's LLM."""
    assert LIMITS is not None and probe.factor == 1
    _, logprobs = score(engine, probe.token_ids, adapter, next(numbers))
    return find_fault(probe, logprobs[: len(probe.logprobs)].tolist(), [], LIMITS)


def next_layer(name: str) -> str:
    return re.sub(r"layers\.(\d)\.", lambda match: f"layers.{1 - int(match[1])}.", name)


def in_the_tower(name: str) -> str:
    return name.replace(".language_model.", ".vision_tower.").replace(".layers.", ".towers.")


def write_changed(adapter: Path, into: Path, change: str) -> None:
    shutil.copytree(adapter, into)
    if change == "alpha":
        file = into / "adapter_config.json"
        settings = json.loads(file.read_text())
        settings["lora_alpha"] /= 2
        file.write_text(json.dumps(settings))
        return
    rename = next_layer if change == "layer numbers" else in_the_tower
    weights = into / "adapter_model.safetensors"
    tensors = {rename(name): tensor for name, tensor in load_file(weights).items()}
    assert set(tensors) != set(load_file(weights)) or change == "layer numbers"
    save_file(tensors, weights)


if __name__ == "__main__":
    main()
