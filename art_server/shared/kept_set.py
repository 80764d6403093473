"""The kept set of a sampled token, as bytes: the tokens that top_k, top_p, min_p, a grammar, bad words and min_tokens
left in play. Imports no torch: the engine's process, the server and the trainer all use this file.
"""

import numpy as np

LIST, MASK = b"i", b"m"
"""The first byte, which names the form: ascending int32 ids, or one bit for each token of the vocabulary."""


def pack_set(token_ids: np.ndarray, num_vocabulary: int) -> bytes:
    """The set of token ids in the shorter form. Equal sets give equal bytes."""
    # The shorter form: 32 bits for each id, or one for each token of the vocabulary.
    if len(token_ids) * 32 <= num_vocabulary:
        return LIST + np.sort(token_ids).astype("<i4").tobytes()
    is_kept_V = np.zeros(num_vocabulary, dtype=bool)
    is_kept_V[token_ids] = True
    return MASK + np.packbits(is_kept_V, bitorder="little").tobytes()


def unpack_set(packed: bytes) -> np.ndarray:
    """The ids of a packed set, int64, ascending.

    Raises:
        ValueError: the bytes have neither form.
    """
    if packed[:1] == LIST and len(packed) % 4 == 1:
        return np.frombuffer(packed, dtype="<i4", offset=1).astype(np.int64)
    if packed[:1] == MASK:
        bits = np.frombuffer(packed, dtype=np.uint8, offset=1)
        return np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    raise ValueError(f"a kept set of {len(packed)} bytes in an unknown form")
