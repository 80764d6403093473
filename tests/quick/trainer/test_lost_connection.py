"""Which errors of a rank say that it could not speak to the others."""

import pytest
import torch.distributed as dist

from art_server.trainer.gang_view import is_lost_connection

GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.2]:25515: Connection reset by peer."
)
"""As gloo of torch 2.13 writes it."""


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError(GLOO), True),
        (dist.DistNetworkError("The client socket has timed out"), True),
        (dist.DistStoreError("wait timeout after 1500000ms"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError(GLOO), False),
    ],
)
def test_a_broken_connection_between_ranks_is_not_the_fault_of_a_job(error: Exception, is_lost: bool) -> None:
    assert is_lost_connection(error) == is_lost
