"""Step 0, which the server writes from a base model's record: the bytes that torch, safetensors and PEFT would write."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import get_peft_model
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

from art_protocol.wire import LoRAConfig
from art_server.engine.inspection_process.adapter_config import read_adapter_config
from art_server.store import files
from art_server.store.adapter_layers import UnknownLayers
from art_server.store.adapter_tensors import check_checkpoint
from art_server.store.base_models import TINY_DIR, BaseModel
from art_server.store.first_step import fresh_tensors, write_first_step
from art_server.store.model_folder import ADAPTER_FILE, CONFIG_FILE
from art_server.trainer.base import adapter_tensors, find_class, peft_config
from art_server.trainer.layers import find_layers
from art_server.trainer.policy import Policy
from tests.makers.architectures import ARCHITECTURES
from tests.makers.first_steps import known_base
from tests.makers.toy_models import FAMILIES, PUBLISHED, toy_config

SEEDS = (0, 1, 3, 12_345, 2**32 - 1)
SHAPES = [(1, 1), (1, 15), (16, 1), (8, 33), (3, 1000), (7, 96), (64, 48), (512, 129), (2, 4096)]


def drawn(shape: tuple[int, int], bound: float, chance: torch.Generator) -> torch.Tensor:
    return torch.zeros(shape).uniform_(-bound, bound, generator=chance)


def bits(tensor: Any) -> list[int]:
    """Of float32 numbers, so that 0.0 differs from -0.0. Any: of torch or numpy."""
    return np.asarray(tensor).view(np.uint32).ravel().tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_numbers_are_those_of_torch(seed: int) -> None:
    shapes = {f"{number}.lora_{name}.weight": shape for number, shape in enumerate(SHAPES) for name in "AB"}
    chance = torch.Generator().manual_seed(seed)
    for name, numbers in fresh_tensors(shapes, seed):
        bound = shapes[name][1] ** -0.5 if "lora_A" in name else 0.0
        assert numbers.dtype == np.float32
        assert bits(numbers) == bits(drawn(shapes[name], bound, chance)), name


def outline(config: Any) -> Any:
    """A model without weights. Any: transformers has classes for each family."""
    with torch.device("meta"):
        return find_class(config)._from_config(config)


def expected_step(model: Any, lora: LoRAConfig, seed: int, folder: Path) -> dict[str, Any]:
    """Writes ADAPTER_FILE as torch and safetensors do, for the layers to which PEFT gives an adapter. Returns PEFT's
    configuration."""
    with torch.device("meta"):
        adapted = get_peft_model(model, peft_config(lora, model))
    chance = torch.Generator().manual_seed(seed)
    tensors = {
        name: drawn((tensor.shape[0], tensor.shape[1]), tensor.shape[1] ** -0.5 if ".lora_A." in name else 0.0, chance)
        for name, tensor in adapter_tensors(adapted).items()  # type: ignore[arg-type]
    }
    folder.mkdir()
    save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})
    adapted.peft_config["default"].inference_mode = True
    adapted.peft_config["default"].save_pretrained(str(folder))
    return json.loads((folder / CONFIG_FILE).read_text())


def unordered(config: dict[str, Any]) -> dict[str, Any]:
    """PEFT has a set of names, in any order."""
    targets = config["target_modules"]
    return config | {"target_modules": targets if isinstance(targets, str) else sorted(targets)}


def config_of(name: str) -> Any:
    if name == "gpt2":  # its layers have their weights transposed
        return GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=64, n_positions=32)
    return ARCHITECTURES[name] if name in ARCHITECTURES else toy_config(name)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # PEFT says that it sets this field
@pytest.mark.parametrize("name", ["gpt2", *{**ARCHITECTURES, **FAMILIES, **PUBLISHED}])
def test_step_0_is_the_one_of_torch_and_peft(name: str, tmp_path: Path) -> None:
    config = config_of(name)
    base = known_base(outline(config), tmp_path)
    layers = base.facts.layers
    paths = list(layers.shapes)
    plain = {*layers.last_names} - {path.rpartition(".")[2] for path in layers.folded}
    adapters = [
        LoRAConfig(),
        LoRAConfig(rank=3, alpha=5.5, target_modules=[min(plain)]),
        LoRAConfig(rank=16, target_modules=paths[1::2]),
    ]
    for number, lora in enumerate(adapters):
        expected = expected_step(outline(config), lora, number, tmp_path / f"torch{number}")
        folder = tmp_path / f"ours{number}"
        write_first_step(base, lora, folder, number)
        assert (folder / ADAPTER_FILE).read_bytes() == (tmp_path / f"torch{number}" / ADAPTER_FILE).read_bytes()
        actual = json.loads((folder / CONFIG_FILE).read_text())
        assert unordered(actual) == unordered(expected | {"base_model_name_or_path": str(tmp_path)})
        assert sorted(entry.name for entry in folder.iterdir()) == [CONFIG_FILE, ADAPTER_FILE]
        assert check_checkpoint(layers, lora, folder).rank == lora.rank


def test_the_trainer_loads_the_step_and_starts_at_the_base(tmp_path: Path) -> None:
    base = BaseModel("art/tiny", TINY_DIR)
    policy = Policy(str(TINY_DIR))
    for number, names in enumerate((None, ["layers.1.mlp.up_proj", "q_proj"])):
        lora = LoRAConfig(rank=4, target_modules=names)
        write_first_step(base, lora, tmp_path / f"{number}")
        policy.load_adapter(lora, tmp_path / f"{number}")
        again = tmp_path / f"again{number}"
        again.mkdir()
        policy.save_adapter(again)
        assert (again / ADAPTER_FILE).read_bytes() == (tmp_path / f"{number}" / ADAPTER_FILE).read_bytes()
        configs = [json.loads((folder / CONFIG_FILE).read_text()) for folder in (again, tmp_path / f"{number}")]
        assert unordered(configs[0]) == unordered(configs[1])


def test_step_0_of_art_tiny_never_changes(tmp_path: Path) -> None:
    """Whatever a later torch draws."""
    write_first_step(BaseModel("art/tiny", TINY_DIR), LoRAConfig(), tmp_path)
    assert (
        files.file_digest(tmp_path / ADAPTER_FILE) == "59d250abfeaaff2e970f5387618316332e67fe4f99af99a201bed23793c206bf"
    )


def test_names_of_other_layers_write_nothing(tmp_path: Path) -> None:
    base = BaseModel("art/tiny", TINY_DIR)
    for names in ([], ["nothing"], ["q_proj", "lm_head"]):
        with pytest.raises(UnknownLayers, match="target_modules"):
            write_first_step(base, LoRAConfig(target_modules=names), tmp_path / "0")
    assert not (tmp_path / "0").exists()


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_a_layer_that_peft_adapts_otherwise_is_reported() -> None:
    model = GPT2LMHeadModel(config_of("gpt2"))
    layers = find_layers(model)
    layers.shapes[next(iter(layers.shapes))] = (1, 1)
    with pytest.raises(ValueError, match="other tensors"):
        read_adapter_config(model, layers)
