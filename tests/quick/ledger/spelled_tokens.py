"""Tokens of a text as a policy may sample them."""

import functools
import itertools

from tokenizers import Tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    number = tokenizer.token_to_id(token)
    assert number is not None, token
    return number


def spell(tokenizer: Tokenizer, text: str, cuts: list[int]) -> list[int]:
    """Tokens of a text as a policy may sample them: cut anywhere, also inside characters, and encoded piece by piece."""
    data = text.encode()
    ends = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    ids: list[int] = []
    for start, stop in itertools.pairwise(ends):
        piece = data[start:stop]
        try:
            ids += tokenizer.encode(piece.decode(), add_special_tokens=False).ids
        except UnicodeDecodeError:  # half a character: byte by byte
            ids += [token_id(tokenizer, byte_letters()[byte]) for byte in piece]
    return ids


@functools.cache
def byte_letters() -> dict[int, str]:
    """The byte-level alphabet, byte by byte (Radford et al. 2019, GPT-2's encoder)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    return letters | {byte: chr(256 + i) for i, byte in enumerate(others)}
