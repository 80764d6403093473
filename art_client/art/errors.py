"""Everything that the client raises on the server's account, in one tree:

    ArtError
    ├── ArtConnectionError     nobody answered, or the connection was lost (also a ConnectionError)
    ├── ArtStatusError         the server answered with an error
    └── ArtJobError            the server accepted a train call, and its job failed

Wrong arguments are ValueError and TypeError, as everywhere.
"""


class ArtError(Exception):
    """Something between this program and its art-server went wrong."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable
        """True: the same call may succeed later, unchanged."""


class ArtConnectionError(ArtError, ConnectionError):
    """No art-server answered, or the connection to it was lost."""


class ArtStatusError(ArtError):
    """The server refused a request."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 500,
        code: str = "error",
        param: str | None = None,
        retryable: bool = False,
    ) -> None:
        super().__init__(message, retryable=retryable)
        self.status = status
        """The HTTP status."""
        self.code = code
        """What went wrong, for programs: "unknown_model", "bad_name"..."""
        self.param = param
        """The field at fault, as a path into the request."""


class ArtJobError(ArtError):
    """A train call was accepted, and its job failed; the model keeps its last whole step."""

    def __init__(
        self, message: str, *, job_id: str = "", code: str = "error", retryable: bool = False
    ) -> None:
        super().__init__(message, retryable=retryable)
        self.job_id = job_id
        self.code = code
        """What went wrong, for programs."""
