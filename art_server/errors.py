"""The server's errors, without HTTP; `api/error_responses.py` maps each class to a status."""


class ServerError(Exception):
    """An error with a stable code, the field at fault, and whether the same request may succeed later."""

    retryable = False
    wait_seconds = 5
    """When a client should repeat a request that may succeed later."""

    def __init__(self, message: str, *, code: str, param: str | None = None):
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param


class InvalidInput(ServerError):
    """The request is wrong."""


class BadRequest(InvalidInput):
    """An inference request is wrong, and vLLM would answer it with a 400."""


class Unauthorized(ServerError):
    """No key, an unknown key, or an expired one."""


class Forbidden(ServerError):
    """The key is known, but does not permit this."""


class NotFound(ServerError):
    """No such model, step or job."""


class Conflict(ServerError):
    """The request contradicts the current state."""


class RecordsMissing(Conflict):
    """Choices came without tokens, and the ledger does not have their records."""

    def __init__(self, message: str, ids: list[str]):
        super().__init__(message, code="records_missing", param="groups")
        self.ids = ids


class TooLarge(ServerError):
    """The body is above the server's limit."""


class TooMany(ServerError):
    """More jobs or scores than the server accepts."""

    retryable = True

    def __init__(self, message: str, *, code: str, param: str | None = None, wait_seconds: int | None = None):
        super().__init__(message, code=code, param=param)
        if wait_seconds is not None:
            self.wait_seconds = wait_seconds


class Unavailable(ServerError):
    """Not possible now: the engine is starting, a step runs too long, or a process died."""

    retryable = True


class StorageFull(ServerError):
    """The disk refused a write; no file was written in part."""

    retryable = True


class UsageError(Exception):
    """The command line cannot be executed; the message contains the reason and the remedy."""


def missing_extra(error: ModuleNotFoundError, extra: str | None = None) -> UsageError:
    """An error that names the extra with a missing package. `extra` None: the extras of the server."""
    names = [extra] if extra is not None else ["server", "gpu"]
    extras = [f"'.[{name}]'" for name in names]
    return UsageError(
        f"'{error.name}' is not installed: pip install {' (CPU) or '.join(extras)} in a clone of the repository (README.md, "
        "section Install)"
    )
