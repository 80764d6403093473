"""Requests of web pages from other origins: the answers to what a browser asks before it sends them."""

import logging
from collections.abc import Sequence

from fastapi.middleware.cors import CORSMiddleware
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp

from art_protocol.learning import ANSWER_HEADER
from art_protocol.wire import STEP_HEADER
from art_server.api import error_responses
from art_server.errors import Forbidden

logger = logging.getLogger(__name__)

EXPOSED_HEADERS = (STEP_HEADER, ANSWER_HEADER, "retry-after")
"""The headers of an answer that a page may read."""
MAX_LOGGED = 20
"""A page can invent origins."""


class CrossOrigin(CORSMiddleware):
    """Permits what `--cors-origin` names. A page of another origin gets an error with the remedy, which its browser shows in the
    developer tools, and the log has a line for each such origin. Cookies are not permitted, so a page needs a key as any other
    client."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS if origins else (),
        )
        self._logged: set[str] = set()

    def preflight_response(self, request_headers: Headers) -> Response:
        origin = request_headers["origin"][:200]
        if self.is_allowed_origin(origin):
            return super().preflight_response(request_headers)
        error = Forbidden(
            f"pages of '{origin}' may not call this server: start it with --cors-origin {origin}", code="foreign_origin"
        )
        if origin not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(origin)
            logger.warning("%s", error)
        return error_responses.answer(error)
