from tests.engine.conftest import garbage  # noqa: F401
