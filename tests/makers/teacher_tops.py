"""Targets of a teacher (`art_protocol.wire.TeacherTop`)."""

import base64
from typing import Any

import numpy as np

from art_protocol.wire import TeacherTop


def teacher_top(ids: Any, logprobs: Any) -> TeacherTop:
    """The targets with these ids and log-probabilities, each tokens x top_k."""
    packed = [np.asarray(values, dtype=kind) for values, kind in ((ids, "<i4"), (logprobs, "<f4"))]
    token_ids, values = (base64.b64encode(numbers.tobytes()).decode() for numbers in packed)
    return TeacherTop(top_k=packed[0].shape[1], token_ids=token_ids, logprobs=values)
