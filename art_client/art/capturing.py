"""`art.capture`: the requests that a block of the program sends to an art-server, with any HTTP client, belong to a session.

`patches` adds the session to the requests. Where no registered model answers, `other_providers` keeps the answers.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager

from art import other_providers, patches
from art.scopes import entered
from art_protocol.sampling import seeds_from


@contextmanager
def capture(
    session: str | Callable[[], str], step: int | str | None = None, seed: int | str | None = None
) -> Generator[None]:
    """Inside the `with` block, requests to the servers of registered models belong to a session, with any HTTP client that
    `patches` covers. A function as `session` returns the name for each request. `art.rollout(model, session)` then has the
    trajectory of these requests. The name of a trainable model means the model's step `step`, or the base model if `step` is
    "base". With a `seed`, each request without a seed gets the next number of a random sequence, which `seed` begins."""
    patches.patch_http_clients()
    with captured_in(other_providers.Capture(session, step, None if seed is None else seeds_from(seed))):
        yield


@contextmanager
def captured_in(scope: other_providers.Capture) -> Generator[None]:
    """Makes the scope the current one inside the `with` block, and ends the scope after the block."""
    try:
        with entered(scope):
            yield
    finally:
        scope.is_ended = True
