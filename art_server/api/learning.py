"""The routes of feedback and of learning from feedback. `art_protocol.learning` defines the bodies."""

import asyncio
from collections.abc import Sequence
from typing import Annotated, cast, get_args

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError

from art_protocol.learning import (
    MAX_LINES,
    Deleted,
    Feedback,
    LearningAction,
    LearningInfo,
    Policy,
    Score,
    ScoreList,
    ScoreState,
)
from art_protocol.wire import NDJSON, ErrorBody
from art_server.api.auth import TheCaller
from art_server.api.bodies import SMALL_MB, SmallBodies, described_body, read_body
from art_server.api.error_responses import answer, detail_of, invalid_body
from art_server.api.parameters import (
    PathModel,
    TheCollector,
    TheDeletion,
    TheFeedback,
    ThePolicies,
    TheReleasing,
    TheScores,
)
from art_server.api.score_rates import PER_KEY
from art_server.errors import Conflict, Forbidden, InvalidInput, ServerError, TooLarge

router = APIRouter(prefix="/api/models/{project}/{name}", route_class=SmallBodies)


def read_lines(body: bytes) -> list[Feedback | ServerError]:
    """The scores of a body: an object, or NDJSON with an object on each line. A wrong line is its error.

    Raises:
        InvalidInput: there is no line.
        TooLarge: there are too many lines.
    """
    lines = [line for line in body.split(b"\n") if line.strip()]
    if not lines:
        raise InvalidInput("the body has no score: send an object, or one on each line", code="invalid_body")
    if len(lines) > MAX_LINES:
        raise TooLarge(
            f"the body has {len(lines):,} lines, and nothing of it was taken: send at most {MAX_LINES:,} scores at once",
            code="too_many_lines",
        )
    read: list[Feedback | ServerError] = []
    for number, line in enumerate(lines, 1):
        try:
            read.append(Feedback.model_validate_json(line))
        except ValidationError as error:
            read.append(invalid_body(error, line=f"line {number}: " if len(lines) > 1 else ""))
    return read


@router.post("/feedback", status_code=202, openapi_extra=described_body(NDJSON, Feedback))
async def give_feedback(
    request: Request, model: PathModel, caller: TheCaller, feedback: TheFeedback, collector: TheCollector
) -> Response:
    """Takes scores. When the answer begins, they are on disk with the exact tokens of what they judge."""
    body = await read_body(request, SMALL_MB, "send fewer scores at once")
    is_single = not request.headers.get("content-type", "").startswith(NDJSON) and body.count(b"\n{") == 0
    read = await asyncio.to_thread(read_object if is_single else read_lines, body)
    request.app.state.score_rates.count(caller.owner, len(read), PER_KEY)
    right = [score for score in read if isinstance(score, Feedback)]
    taken = iter(await asyncio.to_thread(feedback.take, model, caller.owner, right))
    results = [next(taken) if isinstance(score, Feedback) else score for score in read]
    if any(isinstance(result, Score) for result in results):
        collector.wake()
    if not is_single:
        lines = [line_of(result, number) for number, result in enumerate(results, 1)]
        return Response("".join(lines), 202, media_type=NDJSON)
    (result,) = results
    if isinstance(result, ServerError):
        return answer(result)
    return JSONResponse(result.model_dump(mode="json", exclude_none=True), 202)


def read_object(body: bytes) -> list[Feedback | ServerError]:
    """The single score of a JSON body, which may have several lines."""
    try:
        return [Feedback.model_validate_json(body)]
    except ValidationError as error:
        return [invalid_body(error)]


def line_of(result: Score | ServerError, number: int) -> str:
    """The line of a reply: a score, or `{"line": NUMBER, "error": {...}}`."""
    if isinstance(result, Score):
        return result.model_dump_json(exclude_none=True) + "\n"
    error = ErrorBody(error=detail_of(result)).model_dump_json()
    return f'{{"line": {number}, {error[1:]}\n'


def own_scores(caller: TheCaller) -> str | None:
    """The owner whose scores a caller may see and take back: its own, with a key for feedback only; None: all."""
    return caller.owner if caller.gives_feedback_only else None


OwnScores = Annotated[str | None, Depends(own_scores)]


@router.get("/feedback")
async def list_feedback(
    model: PathModel,
    scores: TheScores,
    owner: OwnScores,
    state: Annotated[str, Query(max_length=100)] = "",
    after: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> ScoreList:
    """Scores in the order in which they came."""
    page, following = await asyncio.to_thread(scores.page, model.number, read_states(state), after, limit, owner)
    return ScoreList(scores=page, next=following)


def read_states(text: str) -> Sequence[ScoreState]:
    states = [name.strip() for name in text.split(",") if name.strip()]
    for name in states:
        if name not in get_args(ScoreState):
            raise InvalidInput(
                f"state '{name[:40]}': use {', '.join(get_args(ScoreState))}", code="bad_parameter", param="state"
            )
    return cast(list[ScoreState], states)


@router.get("/feedback/{score}")
async def show_score(model: PathModel, score: str, scores: TheScores, owner: OwnScores) -> Score:
    return await asyncio.to_thread(scores.get, model.number, score, owner)


@router.delete("/feedback/{score}")
async def retract_score(model: PathModel, score: str, scores: TheScores, owner: OwnScores) -> Score:
    return await asyncio.to_thread(scores.retract, model.number, score, owner)


@router.delete("/feedback")
async def delete_user(
    model: PathModel,
    caller: TheCaller,
    deletion: TheDeletion,
    user: Annotated[str, Query(min_length=1, max_length=256)],
) -> Deleted:
    """Deletes the scores of a user."""
    if caller.gives_feedback_only:
        raise Forbidden("this key lacks the scope 'train': it takes back its own scores by their ids", code="forbidden")
    return await asyncio.to_thread(deletion.delete_user, model, user)


@router.delete("/answers/{answer}")
async def delete_answer(model: PathModel, answer: str, deletion: TheDeletion) -> Deleted:
    """Deletes an answer with its scores."""
    return await asyncio.to_thread(deletion.delete_answer, model, answer)


@router.delete("/sessions/{session}")
async def delete_session(model: PathModel, session: str, deletion: TheDeletion) -> Deleted:
    """Deletes a model's answers in a session with their messages and scores."""
    return await asyncio.to_thread(deletion.delete_session, model, session)


@router.put("/learning")
async def set_policy(model: PathModel, body: Policy, policies: ThePolicies, collector: TheCollector) -> LearningInfo:
    """Replaces the policy, and turns the learning on."""
    await asyncio.to_thread(policies.set_policy, model, body)
    collector.wake()
    return await collector.info(model)


@router.get("/learning")
async def show_learning(model: PathModel, collector: TheCollector) -> LearningInfo:
    return await collector.info(model)


@router.post("/learning")
async def change_learning(
    model: PathModel, body: LearningAction, policies: ThePolicies, collector: TheCollector, releasing: TheReleasing
) -> LearningInfo:
    """Pauses or resumes the learning, trains the scores that wait, also if they are fewer than a batch, or decides on a release."""
    if body.action == "train":
        await collector.collect_now(model)
    elif body.action == "promote":
        await releasing.promote_now(model)
    elif body.action == "rollback":
        await releasing.roll_back_now(model)
    else:
        await asyncio.to_thread(policies.set_state, model, "paused" if body.action == "pause" else "on")
        collector.wake()
    return await collector.info(model)


@router.delete("/learning")
async def stop_learning(model: PathModel, policies: ThePolicies, collector: TheCollector) -> LearningInfo:
    """Turns the learning off. The scores stay."""
    if model.holds_steps:
        raise Conflict(
            f"a release of '{model.id}' is not decided yet: promote it or roll it back first",
            code="release_is_open",
            param="name",
        )
    await asyncio.to_thread(policies.set_state, model, "off")
    return await collector.info(model)
