"""Fixtures that the tests of annexes share with the core's tests."""

from tests.conftest import anyio_backend, collector  # noqa: F401
from tests.quick.client.conftest import (  # noqa: F401
    answer,
    backend,
    groups,
    make_server,
    model,
    server,
    server_trains,
)
from tests.quick.conftest import in_process  # noqa: F401
