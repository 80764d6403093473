"""The byte-level BPE tokenizer: learned from synthetic chats and English sentences."""

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tiny_model.chats import draw_chat
from tiny_model.words import SENTENCES, WORDS, make_rng

VOCABULARY_SIZE = 1408
"""With this size, the words of the prompts are single tokens, and each token is frequent enough to be learned."""

NUM_CORPUS_CHATS = 6000

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXT_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""Single tokens that stay visible in decoded text, for the parsers of tool calls and thoughts."""

TEMPLATE_FILE = Path(__file__).parent / "chat_template.jinja"

_PIECES = (
    r"[ABC][123](?![\p{L}\p{N}])"
    r"| ?\p{Ll}+|\p{Lu}\p{Ll}+|\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+|\s+"
)
"""The split of text before merges. A board's cell such as B2 stays whole, other digits are single. No piece has a space
before a capital or a digit, so names and numbers have the same tokens in a question and in JSON."""


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """The tokenizer with its chat template, learned from the seed's chats."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    learned.decoder = decoders.ByteLevel()
    learned.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    learned.add_tokens([AddedToken(token, special=False) for token in TEXT_TOKENS])
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(SPECIAL_TOKENS) - len(TEXT_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learned.train_from_iterator(_corpus(seed), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=learned,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE_FILE.read_text(),
    )


def _corpus(seed: int) -> Iterator[str]:
    """The texts of synthetic chats, the JSON of their tools, and English sentences."""
    rng = make_rng(f"{seed}/tokenizer")
    for _ in range(NUM_CORPUS_CHATS):
        chat = draw_chat(rng)
        for message in chat.messages:
            yield from (value for value in message.values() if isinstance(value, str))
            yield from (json.dumps(call) for call in message.get("tool_calls") or [])
        yield from (json.dumps(tool) for tool in chat.tools or [])
    for _ in range(20):
        yield from SENTENCES
        yield from (f"{word} {word}" for word in WORDS)
