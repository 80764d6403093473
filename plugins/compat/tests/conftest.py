import pytest

from art import bars, unknown_fields
from tests.quick.conftest import no_certificates  # noqa: F401
from tests.quick.models.conftest import path, tiny_adapter  # noqa: F401


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test gets its warnings, also those that an earlier one got."""
    monkeypatch.setattr(unknown_fields, "_warned", set[tuple[str, str]]())
    monkeypatch.setattr(bars, "SECONDS", 0.0)
