"""Errors by what programs read of them: class, code and field. Their sentences: tests/quick/server/test_sentences.py."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

E = TypeVar("E", bound=Exception)


@contextmanager
def refused(kind: type[E], code: str, param: str | None = None) -> Iterator[pytest.ExceptionInfo[E]]:
    """The block ends in an error of this class, code and field."""
    with pytest.raises(kind) as caught:
        yield caught
    error: Any = caught.value
    assert (error.code, getattr(error, "param", None)) == (code, param), str(error)
