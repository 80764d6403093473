"""The benchmark's input: a random model, of Qwen3's shape by default, and groups of token sequences that share prompts and turns."""

import random
from pathlib import Path
from typing import Any

GRID: list[dict] = [
    {"name": "P=512 R=64", "prompt": 512, "completion": 64},
    {"name": "P=64 R=256", "prompt": 64, "completion": 256},
    {"name": "4 turns, 24 of 48 stripped", "num_groups": 1, "prompt": 256, "completion": 48}
    | {"turns": 4, "strip": 24, "trl_batch": 16},
    {"name": "skewed lengths", "group": 1, "num_groups": 16, "prompt": 64, "completion": 256} | {"skew": True},
    {"name": "G=1", "group": 1, "num_groups": 8, "prompt": 512, "completion": 64},
    {"name": "P=1024 R=64", "prompt": 1024, "completion": 64},
    {"name": "G=16 P=2048 R=64", "group": 16, "num_groups": 1, "prompt": 2048, "completion": 64} | {"trl_batch": 8},
    {"name": "G=4 P=512 R=64", "group": 4, "num_groups": 4, "prompt": 512, "completion": 64},
    {"name": "G=16 P=512 R=64", "group": 16, "num_groups": 1, "prompt": 512, "completion": 64},
    {"name": "P=128 R=64", "prompt": 128, "completion": 64},
    {"name": "P=256 R=128", "prompt": 256, "completion": 128},
    {"name": "P=512 R=64 V=32768", "prompt": 512, "completion": 64, "vocab": 32_768},
]
"""Cells of the published table. A setting that a cell omits has the command line's default."""


FAMILIES = ("qwen3", "qwen3_5_text", "granitemoehybrid", "lfm2", "nemotron_h", "falcon_h1")
STATE_SPACE = {"mamba_n_groups": 1, "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_expand": 2}


def family_settings(family: str, hidden: int, layers: int) -> dict:
    """A family's own settings. Every fourth layer is attention where a family also has recurrent layers, as published."""

    def kinds(attention: str, recurrent: str) -> list[str]:
        return [recurrent if (index + 1) % 4 else attention for index in range(layers)]

    heads = {"mamba_n_heads": 2 * hidden // 64, "mamba_d_head": 64}
    return {
        "qwen3": {},
        "qwen3_5_text": {
            "linear_num_key_heads": hidden // 64,
            "linear_num_value_heads": hidden // 64,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "layer_types": kinds("full_attention", "linear_attention"),
        },
        "granitemoehybrid": STATE_SPACE
        | heads
        | {
            "layer_types": kinds("attention", "mamba"),
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 3 * hidden,
        },
        "lfm2": {
            "block_auto_adjust_ff_dim": False,
            "layer_types": kinds("full_attention", "conv"),
        },
        "nemotron_h": {
            "layers_block_type": [layer for kind in kinds("attention", "mamba") for layer in (kind, "mlp")],
            "mamba_num_heads": 2 * hidden // 64,
            "mamba_head_dim": 64,
            "n_groups": 1,
            "ssm_state_size": 64,
            "conv_kernel": 4,
        },
        "falcon_h1": STATE_SPACE | heads | {"mamba_d_ssm": 2 * hidden},
    }[family]


def make_config(settings: dict) -> Any:
    """The configuration of a model with this shape. Any: transformers is imported only here."""
    from transformers import AutoConfig

    hidden, window = settings["hidden"], settings.get("window")
    family = settings.get("family", "qwen3")
    shape = {
        "vocab_size": settings["vocab"],
        "hidden_size": hidden,
        "intermediate_size": settings.get("intermediate") or 3 * hidden,
        "num_hidden_layers": settings["layers"],
        "num_attention_heads": settings.get("heads") or hidden // 64,
        "num_key_value_heads": settings.get("kv") or hidden // 128,
        "head_dim": settings.get("head_dim", 64),
        "tie_word_embeddings": True,
        "pad_token_id": 1,
        "eos_token_id": 2,
        "bos_token_id": 0,
    }
    if family == "qwen3":
        shape |= {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "max_window_layers": 0,
        }
    if family == "nemotron_h":  # the family derives the number of layers from the list of their kinds
        del shape["num_hidden_layers"]
    return AutoConfig.for_model(family, **shape | family_settings(family, hidden, settings["layers"]))


def make_model(root: Path, settings: dict) -> None:
    """Writes ROOT/base, created on the device in the settings' dtype, and ROOT/adapter. The adapter's B matrices are not
    zero, so that every matrix has a gradient."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    from art_protocol.wire import LoRAConfig
    from art_server.store.model_folder import ADAPTER_FILE
    from tests.makers.first_steps import write_first_checkpoint

    torch.manual_seed(0)
    with torch.device(settings.get("device", "cpu")):
        model = AutoModelForCausalLM.from_config(
            make_config(settings), dtype=getattr(torch, settings.get("dtype", "float32"))
        )
    model.save_pretrained(root / "base")
    del model
    file = root / "adapter" / ADAPTER_FILE
    write_first_checkpoint(str(root / "base"), LoRAConfig(), 1, root / "adapter")
    chance = torch.Generator().manual_seed(2)
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if "lora_B" in name:
            tensor.normal_(std=0.02, generator=chance)
    save_file(tensors, file, metadata={"format": "pt"})
    _make_tokenizer(root / "base", settings["vocab"])


def make_groups(rng: random.Random, settings: dict) -> list[list[dict]]:
    """Groups of rows {tokens, num_context, reward}; every token after the context is trained.

    Each turn of a trajectory is one row. Its context contains the earlier turns without their first `strip` tokens.
    Where `strip` is above 0, every framework that merges turns by common prefix trains these same rows.
    """

    def draw(count: int) -> list[int]:
        return [rng.randrange(10, settings["vocab"]) for _ in range(count)]

    groups = []
    for _ in range(settings["num_groups"]):
        prompt = draw(settings["prompt"])
        rows = []
        for _ in range(settings["group"]):
            reward, context = rng.random(), list(prompt)
            for _ in range(settings["turns"]):
                length = settings["completion"]
                if settings["skew"]:
                    # Most completions are short; a few have almost the full length.
                    length = max(8, round(length * rng.random() ** 3))
                said = draw(length)
                rows.append({"tokens": context + said, "num_context": len(context), "reward": reward})
                context = context + said[settings["strip"] :] + draw(settings["tool"])
        groups.append(rows)
    if settings["group"] * settings["turns"] == 1:
        # A group of one row has no signal, so all rows form one group, whose prompts differ.
        groups = [[row for rows in groups for row in rows]]
    return groups


def _make_tokenizer(folder: Path, vocab: int) -> None:
    """Writes a tokenizer, because TRL requires one. The trained token ids do not come from it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", pad_token="t1", eos_token="t2").save_pretrained(
        folder
    )
