"""What quick tests share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from art_server.store import base_facts

# Before torch is imported. Models of a test gain nothing from a second thread, which spins while the other core is busy.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="module", autouse=True)
def no_certificates() -> Iterator[None]:
    """Quick tests have no TLS. Each HTTP client would read all certificates of the machine, which takes longer than most tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", os.devnull)
        yield


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process of its own for each record of a base model, which takes many seconds to import torch and transformers."""

    def inspected(folder: str, template: str) -> str:
        from art_server.engine.inspection_process.inspect_model import inspect  # loads torch

        return inspect(Path(folder), Path(template) if template else None).model_dump_json()

    monkeypatch.setattr(base_facts, "inspect", inspected)
