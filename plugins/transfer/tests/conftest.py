from tests.quick.checkpoints.conftest import path, tiny_adapter  # noqa: F401
