"""Adapters whose configuration selects layers by patterns, numbers or exclusions, and rank-stabilised ones, as PEFT writes
them: they are the plain adapters that PEFT makes of them."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer

from art_protocol.wire import LoRAConfig
from art_server.store.adapter import read_lora
from art_server.store.adapter_tensors import check_checkpoint
from art_server.store.archive import Description, write_tar
from art_server.store.base_models import TINY_DIR, BaseModel
from art_server.store.model_folder import CONFIG_FILE, content_digests
from art_server.store.selected_layers import BadPattern, not_selected
from art_server.trainer.base import load_base
from art_server.trainer.policy import Policy
from tests.quick.models.house import house

TINY = BaseModel("art/tiny", TINY_DIR)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
UNSLOTH = (
    r"(?:.*?(?:language|text).*?)?model\.layers\.[\d]{1,}\.(?:self_attn|mlp)\."
    r"(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
)
pytestmark = pytest.mark.anyio

CONFIGS: dict[str, dict[str, Any]] = {
    "all by a pattern": {"target_modules": UNSLOTH},
    "all linear": {"target_modules": "all-linear"},
    "attention by a pattern": {"target_modules": r".*self_attn\.(?:q_proj|v_proj)"},
    "one layer by a pattern": {"target_modules": r"model\.layers\.1\..*_proj"},
    "some numbers": {"target_modules": ALL, "layers_to_transform": [0, 1]},
    "one number": {"target_modules": ["q_proj"], "layers_to_transform": 1},
    "numbers behind a name": {"target_modules": ALL, "layers_to_transform": [1], "layers_pattern": "layers"},
    "numbers behind names": {"target_modules": ALL, "layers_to_transform": [0], "layers_pattern": ["h", "lay.*"]},
    "no numbers": {"target_modules": ["q_proj"], "layers_to_transform": []},
    "a path beside numbers": {
        "target_modules": ["model.layers.0.mlp.up_proj", "q_proj"], "layers_to_transform": [1],
    },
    "without a name": {"target_modules": ALL, "exclude_modules": ["k_proj"]},
    "without a pattern": {"target_modules": ALL, "exclude_modules": r"model\.layers\.0\..*"},
    "all linear without a name": {"target_modules": "all-linear", "exclude_modules": ["mlp.up_proj"]},
    "rank-stabilised": {"target_modules": ["q_proj"], "use_rslora": True},
    "rank-stabilised by a pattern": {"target_modules": r".*\.o_proj", "use_rslora": True, "lora_alpha": 5},
}  # fmt: skip


def saved(folder: Path, **fields: Any) -> PeftModel:
    """PEFT's adapter with matrices that are not zero, saved into a folder."""
    torch.manual_seed(0)
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **fields})
    model = get_peft_model(load_base(str(TINY_DIR), torch.float32, torch.device("cpu")), config)
    assert isinstance(model, PeftModel)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(str(folder))
    return model


def changes(model: PeftModel) -> dict[str, torch.Tensor]:
    """What an adapter adds to the weights of each layer."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]
    return {name: layer.get_delta_weight("default") for name, layer in layers}  # type: ignore[operator]


@pytest.mark.parametrize("name", CONFIGS)
def test_an_adapter_is_the_function_that_peft_makes_of_it(name: str, tmp_path: Path) -> None:
    expected = changes(saved(tmp_path, **CONFIGS[name]))
    lora, _ = read_lora(tmp_path)
    lora = check_checkpoint(TINY.facts.layers, lora, tmp_path)
    policy = Policy(str(TINY_DIR))
    policy.load_adapter(lora, tmp_path)
    (tmp_path / "again").mkdir()
    policy.save_adapter(tmp_path / "again")
    again, _ = read_lora(tmp_path / "again")
    policy.load_adapter(check_checkpoint(TINY.facts.layers, again, tmp_path / "again"), tmp_path / "again")
    actual = changes(policy.model)
    assert actual.keys() == expected.keys() and actual
    for layer, change in expected.items():
        torch.testing.assert_close(actual[layer], change)


def test_layers_have_their_shortest_names(tmp_path: Path) -> None:
    def names(known: LoRAConfig | None = None, **fields: Any) -> list[str] | None:
        saved(tmp_path, **fields)
        return check_checkpoint(TINY.facts.layers, read_lora(tmp_path)[0], tmp_path, known).target_modules

    assert names(target_modules=UNSLOTH) is None
    assert names(LoRAConfig(target_modules=ALL), target_modules=UNSLOTH) == ALL
    attention = r".*self_attn\.(?:q_proj|v_proj)"
    assert names(target_modules=attention) == ["q_proj", "v_proj"]
    assert names(LoRAConfig(target_modules=["v_proj", "q_proj"]), target_modules=attention) == ["v_proj", "q_proj"]
    assert names(LoRAConfig(target_modules=["v_proj"]), target_modules=attention) == ["q_proj", "v_proj"]
    assert names(target_modules=["q_proj"], layers_to_transform=[1]) == ["model.layers.1.self_attn.q_proj"]


@pytest.mark.parametrize("targets", [None, "all-linear", "missing"])
@pytest.mark.parametrize("trained", [["q_proj", "v_proj"], ALL])
def test_layers_that_the_configuration_does_not_name_are_read_from_the_tensors(
    targets: str | None, trained: list[str], tmp_path: Path
) -> None:
    saved(tmp_path, target_modules=trained)
    config = json.loads((tmp_path / CONFIG_FILE).read_text()) | {"target_modules": targets}
    if targets == "missing":
        del config["target_modules"]
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
    lora = check_checkpoint(TINY.facts.layers, read_lora(tmp_path)[0], tmp_path)
    assert lora.target_modules == (None if trained == ALL else trained)


def test_a_pattern_without_end_is_ended() -> None:
    config = {"target_modules": r"(.*)*(.*)*(.*)*(.*)*(.*)*\.nothing"}
    with pytest.raises(BadPattern, match=r"target_modules cannot be matched .* takes longer"):
        not_selected(config, ["model.layers.0.self_attn.q_proj" * 8], timeout_seconds=0.5)
    with pytest.raises(BadPattern, match=r"layers_pattern cannot be matched"):
        not_selected({"target_modules": ["q"], "layers_to_transform": [1], "layers_pattern": "("}, ["layers.1.q"])


def tar_of_description(content: Path, description: Description) -> bytes:
    buffer = io.BytesIO()
    write_tar(content, description, buffer)
    return buffer.getvalue()


async def test_an_upload_by_a_pattern_trains_on_and_what_does_not_fit_names_no_path(tmp_path: Path) -> None:
    content = tmp_path / "content"
    saved(content, target_modules=UNSLOTH)
    lora, _ = read_lora(content)
    (content / "README.md").unlink()
    description = Description(step=1, base_model="art/tiny", lora=lora, files=content_digests(content))
    async with house(tmp_path / "server") as here, here.client() as http:
        reply = await http.put("/api/models/q/new/checkpoints/1.tar", content=tar_of_description(content, description))
        assert reply.status_code == 201, reply.text
        assert here.registry.get("q", "new").record.lora == LoRAConfig(rank=4, alpha=8.0)
        fewer = description.model_copy(update={"lora": LoRAConfig(rank=4, alpha=8.0, target_modules=["q_proj"])})
        refused = await http.put("/api/models/q/other/checkpoints/1.tar", content=tar_of_description(content, fewer))
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (422, "adapter")
        assert "target_modules is q_proj" in error["message"] and str(TINY_DIR) not in error["message"]
        assert CONFIG_FILE not in error["message"]
