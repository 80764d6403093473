"""What comparisons with TRL share."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from art_server.trainer.policy import ADAPTER_FILE

VOCABULARY = 128


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {f"t{index}": index for index in range(VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="t1")), unk_token="t1", pad_token="t0", eos_token="t2"
    )


def assert_same_weights(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    for key, tensor in load_file(folder / ADAPTER_FILE).items():
        assert float((tensor - weights[key]).norm()) <= 1e-4 * float(weights[key].norm()), key
