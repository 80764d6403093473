"""The exceptions of failed calls to a server:

    ArtError
    ├── ArtConnectionError     no server answered, or the connection was lost (also a ConnectionError)
    ├── ArtStatusError         the server answered with an error
    └── ArtJobError            the job of an accepted train call failed

Invalid arguments raise ValueError or TypeError.
"""

from collections.abc import Callable, Sequence


class ArtError(Exception):
    """A call to an art-server failed."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable
        """True: the unchanged call may succeed later."""


class ArtConnectionError(ArtError, ConnectionError):
    """No art-server answered, or the connection to it was lost."""


class ArtStatusError(ArtError):
    """The server answered a request with an error."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 500,
        code: str = "error",
        param: str | None = None,
        retryable: bool = False,
        ids: Sequence[str] = (),
    ) -> None:
        super().__init__(message, retryable=retryable)
        self.status = status
        """The HTTP status."""
        self.code = code
        """Identifier of the error, for programs: "unknown_model", "bad_name"..."""
        self.param = param
        """The invalid field, as a path into the body, or the invalid header."""
        self.ids = ids
        """With the code "records_missing": the ids of the choices whose tokens the server lacks."""


class ArtJobError(ArtError):
    """The job of an accepted train call failed. The model keeps its last complete step."""

    def __init__(self, message: str, *, job_id: str = "", code: str = "error", retryable: bool = False) -> None:
        super().__init__(message, retryable=retryable)
        self.job_id = job_id
        self.code = code
        """Identifier of the error, for programs."""


def error_text(error: object, show: Callable[[object], str] = str) -> str:
    """The text of an error by `show`. If the `__str__` or `__repr__` of a program's exception raises, the text reports
    that: `'<MyError, whose text raises KeyError>'`."""
    try:
        return show(error)
    except Exception as failure:
        return f"<{type(error).__name__}, whose text raises {type(failure).__name__}>"
