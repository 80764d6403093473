import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def folders_of_examples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The examples of a property make folders of their own. They end with pytest's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("examples")))
        yield
