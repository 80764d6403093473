"""Tokens for browsers: a page may give one score of one answer, and needs no key.

A token contains its model, answer, name of scores, user and expiry, with a MAC of them, so the server stores no token. A token is
valid as long as its owner, the key that it was issued to, is valid. To revoke all tokens, delete
`PATH/.server/feedback_tokens_secret` and restart.
"""

import asyncio
import base64
import hashlib
import hmac
import json
import time
from dataclasses import astuple, dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from art_protocol.learning import Feedback, FeedbackToken, FeedbackTokenRequest, TokenReply, TokenScore
from art_server.api.auth import TOKENS, TheCaller
from art_server.api.bodies import SmallBodies
from art_server.api.error_responses import answer
from art_server.api.keys import Keys
from art_server.api.parameters import PathModel, TheCollector, TheFeedback, TheRegistry
from art_server.api.score_rates import PER_TOKEN
from art_server.errors import Forbidden, ServerError, Unauthorized
from art_server.settings import ApiKey
from art_server.store.registry import RegisteredModel, Registry

router = APIRouter(route_class=SmallBodies)


@dataclass(frozen=True, slots=True)
class TokenClaim:
    """What a token permits."""

    model: int
    """The model's number."""
    answer: str
    """The choice's id."""
    name: str
    user: str | None
    """The user's keyed hash."""
    owner: str
    """Of the key that the token was issued to."""
    expires: float
    """Seconds since 1970."""

    @property
    def sender(self) -> str:
        """Names the one score for which tokens may be issued again and again."""
        return f"token {self.model} {self.answer} {self.name} {self.user}"


class FeedbackTokens:
    """Makes and verifies the tokens of one server."""

    def __init__(self, secret: bytes):
        self._secret = secret

    def make(self, claim: TokenClaim) -> str:
        """A token, of characters that need no escape in a URL."""
        content = encode(json.dumps(astuple(claim), separators=(",", ":")).encode())
        return f"{content}.{self._mac(content)}"

    def read(self, token: str) -> TokenClaim:
        """What a token permits.

        Raises:
            Unauthorized: the token is not of this server, or has expired.
        """
        content, _, mac = token.partition(".")
        if not hmac.compare_digest(self._mac(content).encode(), mac.encode(errors="surrogatepass")):
            raise wrong_token()
        padding = "=" * (-len(content) % 4)
        claim = TokenClaim(*json.loads(base64.urlsafe_b64decode(content + padding)))
        if time.time() >= claim.expires:
            raise Unauthorized("this token has expired: load the page again for another", code="expired_token")
        return claim

    def _mac(self, content: str) -> str:
        return encode(hmac.new(self._secret, content.encode(errors="surrogatepass"), hashlib.sha256).digest())


def encode(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def wrong_token() -> Unauthorized:
    return Unauthorized(
        "this is no token of a model of this server: ask for one with POST .../feedback/tokens", code="wrong_token"
    )


@router.post("/api/models/{project}/{name}/feedback/tokens")
async def make_token(
    request: Request, model: PathModel, body: FeedbackTokenRequest, caller: TheCaller, feedback: TheFeedback
) -> FeedbackToken:
    """A token with which a browser may give one score, without a key."""
    choice, user = await asyncio.to_thread(feedback.identify, model, body.answer, body.name, body.user)
    claim = TokenClaim(model.number, choice, body.name, user, caller.owner, time.time() + body.seconds)
    token = request.app.state.feedback_tokens.make(claim)
    return FeedbackToken(token=token, path=f"{TOKENS}{token}", expires_at=claim.expires)


async def _claim(request: Request, token: str) -> TokenClaim:
    return request.app.state.feedback_tokens.read(token)


Claim = Annotated[TokenClaim, Depends(_claim)]


@router.post("/feedback/{token}", status_code=202)
async def give_score(
    request: Request,
    claim: Claim,
    body: TokenScore,
    registry: TheRegistry,
    feedback: TheFeedback,
    collector: TheCollector,
) -> Response:
    """Takes the score that a token is for. A later score with the token replaces an earlier one."""
    model = find_model(claim, registry, request.app.state.keys)
    request.app.state.score_rates.count(claim.sender, 1, PER_TOKEN)
    score = Feedback(answer=claim.answer, name=claim.name, value=body.value, comment=body.comment)
    (result,) = await asyncio.to_thread(feedback.take, model, claim.owner, [score], user_hash=claim.user)
    if isinstance(result, ServerError):
        return answer(result)
    collector.wake()
    assert result.value is not None, "a browser sends a value"
    reply = TokenReply(name=result.name, value=result.value, state=result.state, reason=result.reason)
    return JSONResponse(reply.model_dump(exclude_none=True), 202)


def find_model(claim: TokenClaim, registry: Registry, keys: Keys) -> RegisteredModel:
    """The model of a token.

    Raises:
        Unauthorized: the model is deleted.
        Forbidden: the key that issued the token is not valid any more, or does not cover the model's project.
    """
    model = registry.of_number(claim.model)
    if model is None:
        raise wrong_token()
    if keys.are_needed("feedback") and not may_give(keys.find_owner(claim.owner), model.record.project):
        raise Forbidden("the key that issued this token is not valid any more", code="revoked_token")
    return model


def may_give(key: ApiKey | None, project: str) -> bool:
    """Whether a key gives scores of a project's models."""
    if key is None or not key.scopes & {"feedback", "train"}:
        return False
    return key.projects is None or project in key.projects
