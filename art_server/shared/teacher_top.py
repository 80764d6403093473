"""A teacher's log-probabilities, from the wire's text to arrays. Imports no torch: the server checks with this file what the
trainer reads with it.
"""

import base64
import binascii

import numpy as np

from art_protocol.wire import TeacherTop

TOLERANCE = 1e-3
"""Engines round: by so much a log-probability may be above 0, and a sum of probabilities above 1."""


def read_top(top: TeacherTop) -> tuple[np.ndarray, np.ndarray]:
    """The ids (int32) and log-probabilities (float32) of a turn, both with the shape tokens x top_k.

    Raises:
        ValueError: the text is not base64, or not so many numbers.
    """
    return _numbers(top, "token_ids", "<i4"), _numbers(top, "logprobs", "<f4")


def check_top(top: TeacherTop, num_vocabulary: int) -> int:
    """The number of the turn's tokens, if all numbers can be those of a distribution.

    Raises:
        ValueError: they cannot; the message says why.
    """
    ids_TK, logprobs_TK = read_top(top)
    if ids_TK.shape != logprobs_TK.shape:
        raise ValueError(f"token_ids has {len(ids_TK)} tokens, and logprobs has {len(logprobs_TK)}")
    if ids_TK.size and not 0 <= int(ids_TK.min()) <= int(ids_TK.max()) < num_vocabulary:
        raise ValueError(f"token_ids has an id outside the model's vocabulary of {num_vocabulary} tokens")
    if bool((np.diff(np.sort(ids_TK, axis=1), axis=1) == 0).any()):
        raise ValueError("token_ids has an id twice at one sampled token")
    if not (np.isfinite(logprobs_TK) & (logprobs_TK <= TOLERANCE)).all():
        raise ValueError("logprobs has a number that is not finite, or above 0")
    if bool((np.exp(logprobs_TK).sum(axis=1) > 1 + TOLERANCE).any()):
        raise ValueError("the probabilities in logprobs have a sum above 1 at a sampled token")
    return len(ids_TK)


def _numbers(top: TeacherTop, name: str, kind: str) -> np.ndarray:
    try:
        content = base64.b64decode(getattr(top, name), validate=True)
    except binascii.Error as error:
        raise ValueError(f"{name} is not base64: {error}") from error
    if len(content) % (4 * top.top_k):
        raise ValueError(f"{name} has {len(content)} bytes, which is no multiple of 4 x top_k ({top.top_k})")
    return np.frombuffer(content, dtype=kind).reshape(-1, top.top_k)
