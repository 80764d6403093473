"""Training from random weights: Muon and AdamW on batches that are drawn by seed and step, with resumable checkpoints.

After the initial weights, only the chats are random, and they depend on the seed and the step alone. So an interrupted
run ends with the same weights as an uninterrupted run.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch.nn import functional
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from tiny_model.chats import draw_chat
from tiny_model.words import make_rng

CHATS_PER_STEP = 16
WARMUP_STEPS = 50
FLAT_SHARE = 0.4
"""The fraction of the steps at the full learning rate. In the other steps the rate falls linearly to zero."""
MATRIX_RATE = 4e-3
OTHER_RATE = 4e-3
CONTEXT_WEIGHT = 0.15
"""The loss weight of tokens that the assistant does not write. The assistant's own tokens have weight 1."""
MAX_MICROBATCH_TOKENS = 3072
"""Padded tokens of one forward pass. This number keeps two cores busy, and the activations fit into the cores' caches."""
MAX_LENGTH_RATIO = 2.5
"""The longest row of a microbatch has at most this multiple of the shortest row's length, because padding costs time."""
MAX_TOKENS = 1024
"""Longer chats are cut. Almost none is longer."""
CHECKPOINT_STEPS = 200


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Padded rows of a step."""

    ids_BT: torch.Tensor
    weights_BT: torch.Tensor
    """The loss weight of each token as a target, 0.0 on padding."""


def build_config(tokenizer: PreTrainedTokenizerBase) -> Qwen3Config:
    """The shape of the model: 3.5 million parameters.

    On a CPU in bfloat16, eager attention trains twice as fast as torch's fused kernel at these lengths. The choice is
    not saved with the model.
    """
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="eager",  # type: ignore[call-arg]  # one of **kwargs, which its decorator hides
    )


def train(tokenizer: PreTrainedTokenizerBase, seed: int, num_steps: int, work_dir: Path) -> Qwen3ForCausalLM:
    """Trains the model in float32 and returns it. Continues from the checkpoint in `work_dir` if there is one.

    Side effects: replaces `work_dir/checkpoint.pt` every `CHECKPOINT_STEPS` steps.
    """
    torch.manual_seed(seed)
    # Compiled kernels otherwise add gradients of the embeddings in an order that varies.
    torch.use_deterministic_algorithms(True)
    model = Qwen3ForCausalLM(build_config(tokenizer))
    model.model.compile(dynamic=True)
    optimizers = build_optimizers(model)
    checkpoint_file = work_dir / f"checkpoint-{seed}-{num_steps}.pt"
    first_step = load_checkpoint(checkpoint_file, model, optimizers)
    progress = tqdm(range(first_step, num_steps), initial=first_step, total=num_steps)
    for step in progress:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["full_lr"] * rate_share(step, num_steps)
        loss = train_step(model, optimizers, draw_batch(tokenizer, seed, step))
        progress.set_postfix(loss=f"{loss:.3f}")
        if (step + 1) % CHECKPOINT_STEPS == 0 or step + 1 == num_steps:
            save_checkpoint(checkpoint_file, model, optimizers, step + 1)
    return model


def rate_share(step: int, num_steps: int) -> float:
    """The learning rate at a step as a fraction of its maximum: linear warm-up, constant, linear decay to zero."""
    decay_steps = num_steps * (1 - FLAT_SHARE)
    return min(1.0, (step + 1) / WARMUP_STEPS, (num_steps - step) / decay_steps)


def build_optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embeddings and the norms."""
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=MATRIX_RATE, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["full_lr"] = group["lr"]
    return optimizers


def train_step(model: Qwen3ForCausalLM, optimizers: list[torch.optim.Optimizer], batch: list[Microbatch]) -> float:
    """One update on the batch; returns its loss per unit of weight."""
    total_weight = sum(float(part.weights_BT.sum()) for part in batch)
    total_loss = 0.0
    for part in batch:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits_BTV = model(input_ids=part.ids_BT[:, :-1], use_cache=False).logits
        losses = functional.cross_entropy(
            logits_BTV.float().flatten(0, 1), part.ids_BT[:, 1:].flatten(), reduction="none"
        )
        loss = losses.dot(part.weights_BT[:, 1:].flatten()) / total_weight
        loss.backward()
        total_loss += loss.item()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return total_loss


def draw_batch(tokenizer: PreTrainedTokenizerBase, seed: int, step: int) -> list[Microbatch]:
    """The step's chats as padded rows, grouped by length."""
    rng = make_rng(f"{seed}/step/{step}")
    chats = [draw_chat(rng) for _ in range(CHATS_PER_STEP)]
    texts = [str(tokenizer.apply_chat_template(chat.messages, tools=chat.tools, tokenize=False)) for chat in chats]
    rows = [row[:MAX_TOKENS] for row in tokenizer(texts)["input_ids"]]
    groups: list[list[list[int]]] = [[]]
    for row in sorted(rows, key=len):
        group = groups[-1]
        is_uneven = bool(group) and len(row) > MAX_LENGTH_RATIO * len(group[0])
        if is_uneven or (len(group) + 1) * len(row) > MAX_MICROBATCH_TOKENS:
            groups.append([])
        groups[-1].append(row)
    return [pad_rows(tokenizer, group) for group in groups]


def pad_rows(tokenizer: PreTrainedTokenizerBase, rows: list[list[int]]) -> Microbatch:
    """The rows padded on the right, with the weights of their tokens."""
    length = max(map(len, rows))
    pad_id = cast(int, tokenizer.pad_token_id)
    weights = [token_weights(tokenizer, row) for row in rows]
    return Microbatch(
        torch.tensor([row + [pad_id] * (length - len(row)) for row in rows]),
        torch.tensor([row + [0.0] * (length - len(row)) for row in weights]),
    )


def token_weights(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[float]:
    """1.0 from each assistant turn's first token through its <|im_end|>, else CONTEXT_WEIGHT."""
    opening = tokenizer.encode("<|im_start|>assistant\n")
    weights = [CONTEXT_WEIGHT] * len(ids)
    inside = False
    for position, token in enumerate(ids):
        if inside:
            weights[position] = 1.0
        if token == tokenizer.eos_token_id:
            inside = False
        elif ids[max(0, position - len(opening) + 1) : position + 1] == opening:
            inside = True
    return weights


def save_checkpoint(file: Path, model: Qwen3ForCausalLM, optimizers: list[torch.optim.Optimizer], step: int) -> None:
    """Writes the state after `step` steps. The file is replaced whole or not at all."""
    state = {
        "step": step,
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, file)


def load_checkpoint(file: Path, model: Qwen3ForCausalLM, optimizers: list[torch.optim.Optimizer]) -> int:
    """Restores the saved state and returns its step, or 0 if nothing is saved."""
    if not file.exists():
        return 0
    state = torch.load(file)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return state["step"]
