from tests.quick.conftest import no_certificates  # noqa: F401
