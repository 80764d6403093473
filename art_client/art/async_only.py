"""`AsyncOnly`: answers a `with` without `async`."""

from typing import Never


class AsyncOnly:
    """Base of classes for `async with`."""

    def __enter__(self) -> Never:
        raise TypeError(f"{type(self).__name__} is for an async function: write `async with` in place of `with`")

    def __exit__(self, *_: object) -> None: ...
