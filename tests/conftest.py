import art_server  # noqa: F401  # isort: skip - first, for torchvision
import pytest
from hypothesis import HealthCheck, settings

# Machines that are busy with other tests are slow now and then; examples are the same in each run.
settings.register_profile(
    "busy", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
