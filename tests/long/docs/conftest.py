from tests.quick.client.conftest import groups, model  # noqa: F401
from tests.quick.docs.conftest import backend, fake  # noqa: F401
