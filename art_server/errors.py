"""What can go wrong in the server, without HTTP; `api/errors.py` maps each class to a status.

ServerError
  InvalidInput       the request is wrong; the message names the field and the remedy
  Unauthorized       no key, an unknown one, or one that expired
  Forbidden          the key may not do this
  NotFound           no such model, step or job
  Conflict           the request contradicts what is there
  TooLarge           a body above the limit
  TooMany            more requests or jobs than are taken at a time
  Unavailable        cannot now, may later: the same request may be repeated
  StorageFull        the disk does not take the write: it is full, read-only or broken
"""


class ServerError(Exception):
    """Carries a stable code, the field at fault, and whether a repetition may succeed."""

    retryable = False

    def __init__(self, message: str, *, code: str, param: str | None = None):
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param


class InvalidInput(ServerError):
    """The request is wrong."""


class Unauthorized(ServerError):
    """No key, an unknown one, or one that expired."""


class Forbidden(ServerError):
    """The key is known and does not cover this."""


class NotFound(ServerError):
    """No such model, step or job."""


class Conflict(ServerError):
    """The request contradicts what is there."""


class TooLarge(ServerError):
    """The body is above the server's limit."""


class TooMany(ServerError):
    """More than is taken at a time; fewer, or later."""

    retryable = True

    def __init__(self, message: str, *, code: str, retry_after_seconds: int | None = None):
        super().__init__(message, code=code)
        self.retry_after_seconds = retry_after_seconds


class Unavailable(ServerError):
    """Not now: the engine starts, a step runs too long, a process died."""

    retryable = True


class StorageFull(ServerError):
    """The disk refused a write; nothing was half-written."""

    retryable = True


class UsageError(Exception):
    """The command line cannot be carried out; the message says why and what to do."""
