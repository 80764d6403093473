"""The HTTP connection to one art-server. Requests, and the event streams of jobs, survive restarts of the server.

This module knows nothing about models and trajectories. All errors are from `art.errors`.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Container
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
from pydantic import ValidationError

from art.errors import ArtConnectionError, ArtError, ArtStatusError
from art.waiting import Waiting, waiting_for
from art_protocol.proxies import DIRECT, fault_of_address
from art_protocol.wire import NDJSON, ErrorBody, ErrorDetail, JobEvent

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_SECONDS = 120
"""Limit for the answer to an ordinary request. The server writes files before it answers some requests."""

ACCEPT_TIMEOUT_SECONDS = 300
"""Limit for the first line of the answer to a train request. The server looks up the tokens of every turn before it
answers."""

EVENTS_TIMEOUT_SECONDS = 60
"""Limit between two lines of a job's event stream. The server sends a line at least every ten seconds."""

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 15.0
"""The wait between two attempts to reach a server that does not answer. The wait doubles after each attempt."""

ENDED = ("done", "error")
"""The events with which a job ends."""
ACCEPTED = ("accepted", *ENDED)
"""The first event after the server has the job is one of these: "accepted", or an end if an earlier request made the job and
the job has ended."""
AGAIN_SECONDS = 60.0
"""The absence of a server is said so often at most, for all calls together."""


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A request for a job. `headers` contain the idempotency key, so that a repeated request gets the same job."""

    path: str
    body: bytes
    headers: dict[str, str]


class Connection:
    """A server's address and key, and the HTTP client of the running event loop."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        reconnect_seconds: float,
        check_server: Callable[[], None] = lambda: None,
    ) -> None:
        self.base_url = base_url
        self.api_key = api_key
        self._reconnect_seconds = reconnect_seconds
        self._check_server = check_server
        """Called while the server does not answer; raises ArtError if waiting is useless."""
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        media_type: str = "application/json",
        timeout_seconds: float = REQUEST_TIMEOUT_SECONDS,
        reconnect_seconds: float | None = None,
        is_repeatable: bool = True,
    ) -> bytes:
        """The body of a successful answer. Repeats the request while the server is away. `body` is of `media_type`.

        After a lost connection, or an error of a gateway in front of the server, the server may have executed the request.
        The request is then repeated only if `is_repeatable`.
        """
        patience = self._reconnect_seconds if reconnect_seconds is None else reconnect_seconds
        outage = _Outage(self.base_url, patience, self._check_server)
        headers = {} if body is None else {"content-type": media_type}
        while True:
            try:
                async with self._send(method, path, body, headers, timeout_seconds) as response:
                    return await response.aread()
            except ArtError as error:
                may_be_done = isinstance(error, _LostConnectionError | _GatewayError)
                if not error.retryable or (may_be_done and not is_repeatable):
                    raise
                await outage.wait(error)

    async def follow_job(
        self,
        source: JobRequest | str,
        on_event: Callable[[JobEvent], None],
        until: Container[str] = ENDED,
    ) -> JobEvent:
        """The first event that is in `until`, of the job that a request makes or of the job with this id. `on_event`
        receives every event, up to and with the returned event.

        If the connection is lost before the server has accepted the job, the request is repeated under the same key, and
        gets the same job. After the acceptance, only the job's event stream is resumed.
        """
        job_id = source if isinstance(source, str) else None
        number: int | None = None
        started = time.monotonic()
        outage = _Outage(self.base_url, self._reconnect_seconds, self._check_server)
        while True:
            try:
                if job_id is None and isinstance(source, JobRequest):
                    headers = {**source.headers, "content-type": NDJSON}
                    request = self._send("POST", source.path, source.body, headers, ACCEPT_TIMEOUT_SECONDS)
                else:
                    after = "" if number is None else f"?after={number}"
                    events = f"/api/jobs/{job_id}/events{after}"
                    request = self._send("GET", events, None, {}, EVENTS_TIMEOUT_SECONDS)
                async with request as response:
                    async for line in response.aiter_lines():
                        if not line.strip():
                            continue
                        event = _parse_event(line)
                        outage.end()
                        if event.event == "accepted":
                            job_id = event.job_id
                        # The event "accepted" has no number: it is no row of the table of jobs (`JobRunner.follow`).
                        if event.number is not None:
                            number = event.number
                        if event.waits_for is not None:
                            self.waiting.report(f"job {event.job_id[:8]}", started, event.waits_for)
                        else:
                            self.waiting.end_line()
                        on_event(event)
                        if event.event in until:
                            return event
                # A server that shuts down closes its streams, and its successor continues the job.
                raise _LostConnectionError(f"art-server at {self.base_url} ended the event stream before the job ended")
            except ArtError as error:
                if not error.retryable:
                    raise
                await outage.wait(error)

    @property
    def waiting(self) -> Waiting:
        """Reports what calls to this server wait for."""
        return waiting_for(self.base_url, self.api_key)

    @property
    def is_open(self) -> bool:
        """Whether a request was made since the last `close`."""
        return self._client is not None

    async def close(self) -> None:
        """Closes the connections. The next request opens new ones."""
        if self._client is not None and self._loop is asyncio.get_running_loop():
            await self._client.aclose()
        self._client = self._loop = None

    @asynccontextmanager
    async def _send(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        timeout_seconds: float,
    ) -> AsyncGenerator[httpx.Response, None]:
        """A successful response. The body is not read yet.

        Raises:
            ArtError: the request fails, or reading the body in the `async with` block fails.
        """
        url = f"{self.base_url}{path}"
        # httpcore writes a body of bytes in one call, so `write` limits the upload of a whole train request.
        timeout = httpx.Timeout(timeout_seconds, connect=10.0, write=600.0)
        try:
            async with self._http().stream(method, url, content=body, headers=headers, timeout=timeout) as response:
                if not response.is_success:
                    await response.aread()
                    raise _to_status_error(response)
                yield response
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            port = httpx.URL(self.base_url).port or 80
            fault = fault_of_address(self.base_url, error)
            remedy = f"is it running? Start it with `art-server --port {port}`, or pass its address to art.Backend"
            # `from None`: the errors of the HTTP library say nothing more, in ninety lines.
            raise ArtConnectionError(
                f"no art-server answers at {self.base_url} ({str(error) or type(error).__name__}): {fault or remedy}",
                retryable=True,
            ) from None
        except httpx.LocalProtocolError:  # the error's text contains the malformed header, perhaps the API key
            raise ArtError(f"{method} {url} was not sent: it has a malformed header") from None
        except httpx.TransportError as error:
            raise _LostConnectionError(
                f"lost the connection to art-server at {self.base_url} in {method} {path}: {error!r}"
            ) from None

    def _http(self) -> httpx.AsyncClient:
        """The HTTP client. Its connections belong to an event loop, so another loop gets a new client."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            headers = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
            self._client, self._loop = httpx.AsyncClient(headers=headers, mounts=DIRECT), loop
        return self._client


class _LostConnectionError(ArtConnectionError):
    """The connection broke after the request may have reached the server."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=True)


class _GatewayError(ArtStatusError):
    """A proxy in front of art-server answered, because its connection to art-server broke or timed out."""


_said_away: dict[str, float] = {}
"""When the absence of a server was last said (monotonic time), by base URL."""


class _Outage:
    """Measures how long the server has been away, and waits between two attempts."""

    def __init__(self, base_url: str, reconnect_seconds: float, check_server: Callable[[], None]) -> None:
        self._base_url = base_url
        self._reconnect_seconds = reconnect_seconds
        self._check_server = check_server
        self._deadline: float | None = None
        self._wait_seconds = FIRST_WAIT_SECONDS

    def end(self) -> None:
        self._deadline, self._wait_seconds = None, FIRST_WAIT_SECONDS

    async def wait(self, error: ArtError) -> None:
        """Sleeps before the next attempt.

        Raises:
            ArtError: the server has been away for too long; raises the given error.
        """
        self._check_server()
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._reconnect_seconds
            if self._reconnect_seconds > 0:
                # Many calls lose the server at the same time.
                is_new = now - _said_away.get(self._base_url, -AGAIN_SECONDS) >= AGAIN_SECONDS
                level = logging.WARNING if is_new else logging.INFO
                logger.log(level, "%s; trying again for %.0f s", error, self._reconnect_seconds)
                if is_new:
                    _said_away[self._base_url] = now
        if now >= self._deadline:
            raise error
        await asyncio.sleep(min(self._wait_seconds, self._deadline - now))
        self._wait_seconds = min(2 * self._wait_seconds, LONGEST_WAIT_SECONDS)


def _parse_event(line: str) -> JobEvent:
    try:
        return JobEvent.model_validate_json(line)
    except ValidationError as error:
        raise ArtError(f"art-server sent a line that is not a job event: {line[:200]!r}") from error


def _to_status_error(response: httpx.Response) -> ArtStatusError:
    kind = ArtStatusError
    try:
        detail = ErrorBody.model_validate_json(response.content).error
    except ValidationError:
        kind = _GatewayError
        detail = ErrorDetail(
            message=response.text.strip()[:500] or response.reason_phrase,
            retryable=response.status_code in (502, 503, 504),
        )
    request = response.request
    return kind(
        f"{detail.message} [{response.status_code} from {request.method} {request.url.path}]",
        status=response.status_code,
        code=detail.code,
        param=detail.param,
        retryable=detail.retryable,
        ids=detail.ids,
    )
