"""Deletion of an answer, a session, or a user's scores: the ledger's records, the scores, and what trained steps keep of them on the
disk. Weights cannot forget: the reply names the steps that have learned from what is deleted.

The rows of scores name those steps, so they are deleted last: after a crash, the same deletion again completes it.
"""

from collections.abc import Callable, Sequence

from art_protocol.learning import Deleted
from art_server.errors import NotFound
from art_server.jobs import replay_record
from art_server.learning.feedback import FeedbackIntake, read_answer_id
from art_server.learning.scores import DoomedScore, Scores
from art_server.ledger.ledger import Ledger
from art_server.store.registry import RegisteredModel


class Deletion:
    """Calls block: files are rewritten."""

    def __init__(self, *, scores: Scores, ledger: Ledger, feedback: FeedbackIntake):
        self._scores = scores
        self._ledger = ledger
        self._feedback = feedback

    def delete_answer(self, model: RegisteredModel, answer: str) -> Deleted:
        """Deletes all choices of an answer, their scores, and the scores of their session.

        Raises:
            NotFound: the server has nothing of the answer.
            Conflict: a job trains a score of the answer.
        """
        request_id, _ = read_answer_id(answer) or (None, None)
        if request_id is None:
            raise not_here(f"answer '{answer[:80]}'", model, "answer")
        choices = self._ledger.choices_of_request(model.number, request_id)
        return self._delete(
            model, choices, lambda: self._scores.of_request(model.number, request_id), f"answer '{answer}'", "answer"
        )

    def delete_session(self, model: RegisteredModel, session: str) -> Deleted:
        """Deletes a model's answers in a session, their messages, and the scores of the session and its answers.

        Raises:
            NotFound: the server has nothing of the session.
            Conflict: a job trains a score of the session.
        """
        choices = self._ledger.choices_of_session(model.number, session)
        deleted = self._delete(
            model,
            choices,
            lambda: self._scores.of_session(model.number, session, choices),
            f"session '{session}'",
            "session",
        )
        self._ledger.forget_session(model.number, session)
        return deleted

    def delete_user(self, model: RegisteredModel, user: str) -> Deleted:
        """Deletes a user's scores. Of scores that steps have trained only the value stays, without user and texts.

        Raises:
            Conflict: a job trains a score of the user.
        """
        doomed = self._scores.of_user(model.number, self._feedback.hash_user(user))
        self._scores.delete_of_user(doomed)
        return Deleted(scores=len(doomed), steps=steps_of(doomed))

    def _delete(
        self,
        model: RegisteredModel,
        choices: Sequence[str],
        find_scores: Callable[[], list[DoomedScore]],
        what: str,
        param: str,
    ) -> Deleted:
        doomed = find_scores()
        if not choices and not doomed:
            raise not_here(what, model, param)
        continued_by = self._ledger.delete(choices)
        doomed = find_scores()  # nobody can score the answers any more
        ids = {*choices, *(choice for score in doomed for choice in score.choices)}
        num_lines = 0
        for step, is_set_aside in sorted({(s.trained_step, s.is_rolled_back) for s in doomed if s.trained_step}):
            num_lines += model.folder.forget_rollouts(step, ids, is_set_aside=is_set_aside)
            replay_record.remove_records(model.folder, step, is_set_aside=is_set_aside)
        self._scores.delete(doomed, ids)
        return Deleted(
            answers=len(choices),
            scores=len(doomed),
            rollouts=num_lines,
            steps=steps_of(doomed),
            continued_by=tuple(continued_by),
        )


def steps_of(scores: Sequence[DoomedScore]) -> tuple[int, ...]:
    """The model's steps that have trained these scores."""
    steps = {score.trained_step for score in scores if score.trained_step is not None and not score.is_rolled_back}
    return tuple(sorted(steps))


def not_here(what: str, model: RegisteredModel, param: str) -> NotFound:
    return NotFound(f"the server has nothing of {what} of '{model.id}'", code=f"unknown_{param}", param=param)
