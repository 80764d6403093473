from tests.quick.conftest import no_certificates  # noqa: F401
from tests.quick.models.conftest import path, tiny_adapter  # noqa: F401
