from tests.quick.checkpoints.conftest import tiny_adapter  # noqa: F401
