import pytest

from tests.contracts import check_server
from tests.fakes.server import FakeArt

pytestmark = pytest.mark.anyio


async def test_the_fake_server_keeps_the_contract(fake: FakeArt) -> None:
    """As the real one (tests/engine/integration/test_contracts.py)."""
    await check_server(fake.url)
