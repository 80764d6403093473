from tests.quick.client.conftest import backend, groups, model, server  # noqa: F401
