"""Tests with the real vLLM of tests/conftest.py, or with Chromium."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def garbage() -> Iterator[None]:
    """Collected at the end of each file, so that a connection which nobody closed fails a test of this file."""
    yield
    gc.collect()
