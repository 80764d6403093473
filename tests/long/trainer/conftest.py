from tests.quick.trainer.conftest import (  # noqa: F401
    adapter_dir,
    base_dir,
    make_batch,
    policy,
    started,
    trees_again,
)
