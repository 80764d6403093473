"""Feedback: a score of an answer or of a session becomes a row, which is committed with its exact tokens before the reply."""

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from art_protocol.learning import Feedback, Policy, Score, ScoreName
from art_protocol.wire import BY_REFERENCE, TOKEN_FIELDS, HistoryBody
from art_server.errors import Conflict, InvalidInput, NotFound, ServerError, TooMany
from art_server.jobs.choices import is_choice
from art_server.learning import pinned
from art_server.learning.policies import Policies
from art_server.learning.scores import NewScore, Scores, Teaching
from art_server.ledger import conversation
from art_server.ledger.ledger import Ledger
from art_server.ledger.records import NAMES_STEP, NEVER_LEARNS, Record
from art_server.ledger.sessions import read_session
from art_server.ledger.splice import split_end
from art_server.store.registry import RegisteredModel

ANSWER_ID = re.compile(r"(?:chatcmpl-|cmpl-|resp_|msg_)?([0-9a-f]{32})(?:-(\d{1,4}))?")
"""The id of an answer of any API, or of a choice."""
ROLLED_BACK, NO_MESSAGES = "rolled_back", "no_messages"
MAX_OPEN = 100_000
"""Scores of a model that may wait for a batch."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What a score judges, as the ledger has it."""

    target: str
    histories: list[HistoryBody]
    records: list[Record]
    has_messages: bool = False
    """Whether the histories have what a teacher reads before the answers."""


class FeedbackIntake:
    """Takes scores. Calls block: the ledger is read, and the rows are committed."""

    def __init__(self, *, scores: Scores, policies: Policies, ledger: Ledger, secret: bytes, max_open: int = MAX_OPEN):
        """`secret` is the key of the users' hashes."""
        self._scores = scores
        self._policies = policies
        self._ledger = ledger
        self._secret = secret
        self._max_open = max_open

    def take(
        self, model: RegisteredModel, owner: str, feedback: Sequence[Feedback], *, user_hash: str | None = None
    ) -> list[Score | ServerError]:
        """The scores as rows, each with its error if it has one. `owner` is that of the caller's key, and `user_hash` replaces the
        scores' users. All scores without an error are on disk when this returns.

        Raises:
            TooMany: too many scores wait for a batch.
            StorageFull: the disk refused the write; no score is taken.
        """
        if self._scores.count_open(model.number) + len(feedback) > self._max_open:
            raise TooMany(
                f"model '{model.id}' has {self._max_open:,} scores that wait for a batch: turn its learning on, or retract some",
                code="too_many_scores",
            )
        policy = self._policies.of(model.number).policy
        read: list[NewScore | Score | ServerError] = []
        for body in feedback:
            try:
                read.append(self._read(model, owner, body, policy, user_hash or self._hash(body.user)))
            except ServerError as error:
                read.append(error)
        added = iter(self._scores.add([score for score in read if isinstance(score, NewScore)]))
        return [next(added) if isinstance(score, NewScore) else score for score in read]

    def identify(self, model: RegisteredModel, answer: str, name: str, user: str | None) -> tuple[str, str | None]:
        """The id of the choice that an answer's id names, and the hash of a user.

        Raises:
            NotFound: there is no such answer of the model.
            InvalidInput: the name is not in the policy, or the answer cannot be trained.
            Conflict: the answer may not be trained.
        """
        find_name(self._policies.of(model.number).policy, name)
        (record,) = self._answer(model, answer).records
        return record.choice_id, self._hash(user)

    def _read(
        self, model: RegisteredModel, owner: str, body: Feedback, policy: Policy, user: str | None
    ) -> NewScore | Score:
        """A new score, or the score of an earlier request with the same id.

        Raises:
            NotFound: there is no such answer or session of the model.
            InvalidInput: the name or the value is not in the policy, only texts come and teach nothing there, or the answer cannot be
                trained.
            Conflict: the id is of another score.
        """
        # Keyed, because the content names the user.
        digest = hmac.new(self._secret, body.model_dump_json().encode(), hashlib.sha256).hexdigest()
        repeated = self._scores.find_repeated(model.number, owner, body.id, digest)
        if repeated is not None:
            return repeated
        value = value_of(body, policy)
        judged = (
            self._answer(model, body.answer, needs_messages=body.has_text)
            if body.answer is not None
            else self._session(model, owner, body.session)
        )
        teaches = which_teaches(body) if judged.has_messages else None
        texts = {"comment": body.comment, "correction": body.correction, "metadata": body.metadata}
        steps = [record.request.step for record in judged.records]
        known = [step for step in steps if step is not None]
        return NewScore(
            model=model.number,
            target=judged.target,
            choices=[record.choice_id for record in judged.records],
            step=min(known, default=None),
            names_step=any(record.sampling.get(NAMES_STEP) for record in judged.records),
            user=user,
            session=self._hash(next((record.request.session for record in judged.records), None)),
            owner=owner,
            name=body.name,
            value=value,
            texts={name: text for name, text in texts.items() if text},
            teaches=teaches,
            client_id=body.id,
            digest=digest,
            made_at=body.made_at,
            answered_at=max(record.created_at for record in judged.records),
            pinned=pinned.pack(judged.histories, judged.records),
            reason=why_untrained(value, teaches, is_rolled_back=len(known) < len(steps)),
        )

    def hash_user(self, user: str) -> str:
        """The keyed hash by which the table of scores knows a user."""
        return hmac.new(self._secret, user.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()[:32]

    def _hash(self, user: str | None) -> str | None:
        return None if user is None else self.hash_user(user)

    def _answer(self, model: RegisteredModel, answer: str, *, needs_messages: bool = False) -> Judged:
        request_id, index = read_answer_id(answer) or (None, 0)
        choice = f"{request_id}-{index}"
        record = self._ledger.find(choice) if request_id is not None else None
        if record is None or record.request.model != model.number:
            raise NotFound(
                f"answer '{answer[:80]}' is no answer of '{model.id}' that this server has: send the `id` of an answer of this "
                "model that is not older than --ledger-max-age-days",
                code="unknown_answer",
                param="answer",
            )
        check_trainable(record)
        sampled, _ = split_end(record.token_ids, self._ledger.end_ids)
        text = self._ledger.decode(sampled) or ""
        entry = reference(record, conversation.message_from(text))
        kept = None
        if needs_messages and has_messages(record):
            kept = self._ledger.find_messages(record.request.request_id)
        messages, tools = kept or ([], None)
        history = HistoryBody(messages_and_choices=[*messages, entry], tools=tools)
        return Judged(f"answer {choice}", [history], [record], has_messages=kept is not None)

    def _session(self, model: RegisteredModel, owner: str, session: str | None) -> Judged:
        assert session is not None, "a score names an answer or a session"
        reply = read_session(self._ledger, model.number, model.record.project, session, owner)
        records: list[Record] = []
        histories: list[HistoryBody] = []
        for history in reply.histories:
            entries: list[dict[str, Any]] = []
            for entry in history.messages_and_choices:
                record = self._ledger.find(entry["art"]["id"]) if is_choice(entry) else None
                if record is None:
                    entries.append(entry["message"] if is_choice(entry) else entry)
                    continue
                check_trainable(record)
                records.append(record)
                entries.append(reference(record, entry["message"]))
            histories.append(HistoryBody(messages_and_choices=entries, tools=history.tools))
        if not records:
            raise NotFound(
                f"session '{session}' has no answer of '{model.id}' that this server has: send a session's name as the agent's "
                "requests do",
                code="unknown_answer",
                param="session",
            )
        by_id = {record.choice_id: record for record in records}
        return Judged(f"session {session}", histories, [*by_id.values()], any(map(has_messages, by_id.values())))


def has_messages(record: Record) -> bool:
    """Whether a chat template wrote the prompt of a record."""
    return record.request.api != "completions"


def which_teaches(body: Feedback) -> Teaching | None:
    """Which text of a score may teach: a correction displaces a comment."""
    if (body.correction or "").strip():
        return "correction"
    return "comment" if body.has_text else None


def why_untrained(value: float | None, teaches: Teaching | None, *, is_rolled_back: bool) -> str | None:
    """Why a score is kept and not trained; None: it may be trained."""
    if is_rolled_back:
        return ROLLED_BACK
    return NO_MESSAGES if value is None and teaches is None else None


def read_answer_id(answer: str) -> tuple[str, int] | None:
    """The request's id and the choice's index in an answer's id; None for another text."""
    match = ANSWER_ID.fullmatch(answer)
    return (match[1], int(match[2] or 0)) if match is not None else None


def reference(record: Record, message: dict[str, Any]) -> dict[str, Any]:
    """A choice of a trajectory that names its record."""
    kept = {name: value for name, value in message.items() if name not in TOKEN_FIELDS}
    mark = {"id": record.choice_id, "step": record.request.step}
    return {"index": 0, "finish_reason": record.finish_reason, "message": kept, "art": mark, BY_REFERENCE: True}


def check_trainable(record: Record) -> None:
    """Checks that a score of an answer may and can teach something.

    Raises:
        Conflict: the answer's caller does not permit learning.
        InvalidInput: the answer was sampled greedily.
    """
    if record.sampling.get(NEVER_LEARNS):
        raise Conflict(
            "the answer's request did not permit learning (x-art-learn: never, or store: false)",
            code="not_for_learning",
            param="answer",
        )
    if record.sampling.get("temperature") == 0:
        raise InvalidInput(
            "the answer was sampled at temperature 0, and always is the same: its score shows nothing to learn. Let some of the "
            "requests sample at temperature 1",
            code="greedy_answer",
            param="answer",
        )


def find_name(policy: Policy, name: str) -> ScoreName:
    """What a name of scores counts.

    Raises:
        InvalidInput: the policy does not have the name.
    """
    if name not in policy.names:
        raise InvalidInput(
            f"name '{name}' is not in the policy, which has {', '.join(policy.names)}: add it to `names` of PUT .../learning",
            code="unknown_name",
            param="name",
        )
    return policy.names[name]


def value_of(body: Feedback, policy: Policy) -> float | None:
    """The value of a score in the range of its name; None: the score has texts only.

    Raises:
        InvalidInput: the policy does not have the name, the value is outside the name's range, or a value is missing.
    """
    name = find_name(policy, body.name)
    if body.value is None:
        if policy.text == "off":
            raise InvalidInput(
                "the policy's text is off, so that comments and corrections train nothing: give a value, or set `text` of PUT "
                ".../learning to 'teach'",
                code="no_value",
                param="value",
            )
        return None
    if isinstance(body.value, bool):
        return name.high if body.value else name.low
    if not name.low <= body.value <= name.high:
        raise InvalidInput(
            f"value {body.value:g} is outside the range of '{body.name}', {name.low:g} to {name.high:g}",
            code="out_of_range",
            param="value",
        )
    return body.value
