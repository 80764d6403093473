"""Decides on releases: each new step meets the guard, and then serves at once, or a canary's scores decide.

`Releasing.run_forever` is the only one that decides. It finds in the table (`releases.py`) and in the model's folder what is to be
done, so a killed server goes on where it was.
"""

import asyncio
import contextlib
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from art_protocol.display import counted
from art_protocol.learning import Policy, ReleaseArm, ReleaseInfo
from art_server.engine.engine import AdapterRefused
from art_server.errors import Conflict, ServerError
from art_server.learning import canary
from art_server.learning.canary import Arm, Look, Opinion
from art_server.learning.guard import Guard
from art_server.learning.policies import Policies
from art_server.learning.releases import MAX_REFUSED, Release, Releases
from art_server.learning.rewards import DAY, reward_of
from art_server.learning.scores import Scores, WaitingScore
from art_server.models.checkpoints import Checkpoints
from art_server.shared.clock import REAL, Clock
from art_server.store.registry import RegisteredModel, Registry, Split

logger = logging.getLogger(__name__)

LOOK_SECONDS = 10.0
"""Time between two looks without news."""


class Releasing:
    """Decides, for all models that learn."""

    def __init__(
        self,
        *,
        releases: Releases,
        scores: Scores,
        policies: Policies,
        registry: Registry,
        checkpoints: Checkpoints,
        guard: Guard,
        clock: Clock = REAL,
    ):
        self._releases = releases
        self._scores = scores
        self._policies = policies
        self._registry = registry
        self._checkpoints = checkpoints
        self._guard = guard
        self._clock = clock
        self._changed = asyncio.Event()
        self._lock = asyncio.Lock()
        """Held while a release is decided."""
        self.on_decision: Callable[[], None] = lambda: None
        """Called when a decision may let a model learn on."""

    def wake(self) -> None:
        """Has a look at once: a step is there, or a score came."""
        self._changed.set()

    def restore(self) -> None:
        """Goes on with the canaries of an earlier server (blocking)."""
        for release in self._releases.all_open():
            model = self._registry.of_number(release.model)
            if model is not None and release.candidate is not None:
                model.split = split_of(release)

    async def run_forever(self) -> None:
        while True:
            self._changed.clear()
            for release in await asyncio.to_thread(self._releases.all_open):
                model = self._registry.of_number(release.model)
                if model is None:
                    continue
                try:
                    await self._decide(model)
                except (
                    ServerError,
                    OSError,
                ) as error:  # the engine starts, or requests use the step: the next look tries again
                    logger.error("the release of %s waits: %s", model.id, error)
            async with self._clock.at_most(LOOK_SECONDS):
                await self._changed.wait()

    def begin(self, model: RegisteredModel) -> None:
        """Opens a release in the transaction of its first job, if none is open: from here on no new step serves undecided."""
        model.holds_steps = True
        self._releases.begin(model.number, model.step)

    def why_waiting(self, model: RegisteredModel) -> str | None:
        """What the next batch waits for (blocking); None: for nothing."""
        release = self._releases.open(model.number)
        if release is None:
            return None
        if release.state == "canary":
            return self._progress(release, self._policies.of(model.number).policy, self._look(release))
        newest = model.folder.newest_step() or 0
        return f"step {newest} meets the guard" if newest > release.passed else None

    # --- deciding ---

    async def _decide(self, model: RegisteredModel) -> None:
        """Does what an open release needs next."""
        release = await asyncio.to_thread(self._releases.open, model.number)
        if release is None:
            return
        policy = (await asyncio.to_thread(self._policies.of, model.number)).policy
        newest = max(model.steps(), default=0)
        reason = None
        if release.state == "steps" and newest <= release.passed:
            if newest < release.passed or not is_enough(release, policy):
                return
        elif release.state == "steps":
            try:
                reason = await self._guard.why_refused(model, newest, model.step, policy.max_kl)
            except AdapterRefused as error:
                reason = f"the engine cannot serve it: {error}"
        async with self._lock:
            if await asyncio.to_thread(self._releases.open, model.number) != release:
                return  # somebody has decided meanwhile
            if release.state == "canary":
                await self._look_at_canary(model, release, policy)
            elif reason is not None:
                await self._refuse(model, release, newest, reason)
            else:
                await self._pass(model, release, newest, policy)

    async def _pass(self, model: RegisteredModel, release: Release, step: int, policy: Policy) -> None:
        """A step has passed the guard: it serves, or it is one of those that a canary will try, or it begins the canary."""
        if step != release.passed:  # else an earlier try, or an earlier server, has noted the step and went no further
            await asyncio.to_thread(self._releases.note_passed, release, step)
            logger.info("%s has passed the guard", model.adapter_name(step))
        if policy.release == "direct":
            await self._promote(model, release, step, f"step {step} has passed the guard")
        elif step - release.incumbent >= policy.steps_per_release:
            await asyncio.to_thread(self._releases.split, release, step, policy.share)
            model.split = Split(step, policy.share, release.number)
        self.on_decision()

    async def _refuse(self, model: RegisteredModel, release: Release, step: int, reason: str) -> None:
        """Sets a step aside. After several in a row the release ends."""
        kept = [kept_step for kept_step in model.steps() if release.incumbent <= kept_step <= release.passed]
        is_last = release.num_refused + 1 >= MAX_REFUSED
        sentence = f"the guard has refused step {step}: {reason}"
        logger.warning("%s: %s", model.id, sentence)
        await asyncio.to_thread(self._releases.note_refused, release, sentence)
        if is_last:  # first, so that a server that is killed here does not learn on
            why = f"{counted(MAX_REFUSED, 'step')} in a row were refused; the last: {sentence}"
            await asyncio.to_thread(self._policies.set_state, model, "paused", why)
        await self._checkpoints.roll_back(model, release.incumbent if is_last else max(kept, default=release.incumbent))
        self.on_decision()

    async def _promote(self, model: RegisteredModel, release: Release, step: int, reason: str) -> None:
        await asyncio.to_thread(self._releases.promote, release, reason)
        model.step, model.holds_steps, model.split = step, False, None
        logger.info("%s serves: %s", model.adapter_name(step), reason)
        self.on_decision()

    async def _roll_back(self, model: RegisteredModel, release: Release, reason: str) -> None:
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(setattr, model, "split", model.split)
            model.split = None
            await asyncio.to_thread(self._releases.note_reason, release, reason)
            await self._checkpoints.roll_back(model, release.incumbent)
            await asyncio.to_thread(
                self._releases.end, release, reason
            )  # one without a step that has passed is open still
            await asyncio.to_thread(self._registry.read_release, model)
            on_failure.pop_all()
        logger.info("%s serves on: %s", model.adapter_name(release.incumbent), reason)
        self.on_decision()

    async def _look_at_canary(self, model: RegisteredModel, release: Release, policy: Policy) -> None:
        candidate, split_at = release.candidate, release.split_at
        assert candidate is not None and split_at is not None, "a canary has both"
        if release.reason is not None:  # decided, but the steps could not be set aside yet
            await self._roll_back(model, release, release.reason)
            return
        seen = await asyncio.to_thread(self._look, release)
        num_due = canary.due_looks(seen.num_scored, policy)
        if num_due > release.num_looks:
            is_better = canary.is_promoted(seen, num_due, policy)
            if is_better is not None:
                reason = verdict(seen, candidate, release.incumbent)
                if is_better:
                    await self._promote(model, release, candidate, f"the canary is better: {reason}")
                else:
                    await self._roll_back(model, release, f"the canary is not better: {reason}")
                return
            if seen.z is not None:
                await asyncio.to_thread(self._releases.note_look, release, num_due)
        if self._clock.now() - split_at > policy.max_days * DAY:
            reason = f"too few scores in {policy.max_days:g} days: {seen.num_scored} of {policy.looks[-1]}"
            await self._roll_back(model, release, reason)

    def _look(self, release: Release) -> Look:
        """What the scores of a canary say (blocking)."""
        assert release.candidate is not None and release.split_at is not None, "a canary has both"
        policy = self._policies.of(release.model).policy
        scores = self._scores.of_canary(release.model, (release.incumbent, release.candidate), release.split_at)
        most = max(1, int(policy.user_share * policy.looks[-1]))
        by_step = opinions_of(scores, policy)
        arms = [canary.capped(by_step[step], most) for step in (release.incumbent, release.candidate)]
        return canary.look(*arms)

    # --- what people ask for ---

    async def promote_now(self, model: RegisteredModel) -> None:
        """Has the newest step that has passed the guard serve.

        Raises:
            Conflict: no release is open, or none of its steps has passed the guard.
        """
        async with self._lock:
            release = await self._open(model)
            step = release.candidate or release.passed
            if step == release.incumbent:
                raise Conflict(
                    f"no step of '{model.id}' behind step {release.incumbent} has passed the guard yet",
                    code="nothing_to_promote",
                )
            await self._promote(model, release, step, f"somebody has promoted step {step}")

    async def roll_back_now(self, model: RegisteredModel) -> None:
        """Ends the open release. Its steps are set aside.

        Raises:
            Conflict: no release is open, or jobs of the model wait or run.
        """
        async with self._lock:
            release = await self._open(model)
            await self._roll_back(model, release, "somebody has rolled the release back")

    async def _open(self, model: RegisteredModel) -> Release:
        release = await asyncio.to_thread(self._releases.open, model.number)
        if release is None:
            raise Conflict(
                f"no release of '{model.id}' is open: step {model.step} serves", code="no_release", param="name"
            )
        return release

    def info(self, model: RegisteredModel) -> ReleaseInfo | None:
        """The newest release as clients read it (blocking)."""
        release = self._releases.newest(model.number)
        if release is None:
            return None
        info = ReleaseInfo(
            state=release.state,
            incumbent=release.incumbent,
            passed=release.passed,
            candidate=release.candidate,
            reason=release.reason,
            began_at=release.began_at,
        )
        if release.state != "canary":
            return info
        seen = self._look(release)
        named = ((release.incumbent, seen.incumbent), (release.candidate, seen.candidate))
        arms = tuple(arm_info(step or 0, arm) for step, arm in named)
        return info.model_copy(update={"arms": arms, "z": finite(seen.z), "share": release.share})

    def _progress(self, release: Release, policy: Policy, seen: Look) -> str:
        """How far a canary is, in a sentence with numbers."""
        following = next((needed for needed in policy.looks if needed > seen.num_scored), policy.looks[-1])
        difference = "" if seen.z is None else f", {seen.difference:+.3f} (z {seen.z:.1f})"
        return (
            f"step {release.candidate} answers {release.share:.0%} of the users: {seen.num_scored} of {policy.looks[-1]} scored "
            f"answers{difference}; the next look comes at {following}"
        )


def arm_info(step: int, arm: Arm) -> ReleaseArm:
    """What the users of a step said, as clients read it."""
    half = 1.96 * math.sqrt(arm.variance) if arm.num_users > 1 else None
    return ReleaseArm(
        step=step,
        scored=arm.num_scored,
        users=arm.num_users,
        mean=arm.mean if arm.num_scored else None,
        interval=None if half is None else (arm.mean - half, arm.mean + half),
    )


def split_of(release: Release) -> Split:
    assert release.candidate is not None and release.share is not None, "a canary has both"
    return Split(release.candidate, release.share, release.number)


def is_enough(release: Release, policy: Policy) -> bool:
    """Whether the steps that have passed the guard are as many as the policy wants for what comes next."""
    num_passed = release.passed - release.incumbent
    return num_passed >= (1 if policy.release == "direct" else policy.steps_per_release)


def opinions_of(scores: Sequence[WaitingScore], policy: Policy) -> dict[int, list[Opinion]]:
    """The rewards of scored answers and sessions, by the step that gave the answers. Without a user, the
    answers of a session are one user's, and an answer without a session is a user's of its own, as the split has it."""
    targets: dict[str, list[WaitingScore]] = {}
    for score in scores:
        if score.name in policy.names and score.value is not None:
            targets.setdefault(score.target, []).append(score)
    opinions: defaultdict[int, list[Opinion]] = defaultdict(list)
    for target, of_target in targets.items():
        users = (score.user or score.session for score in of_target)
        user = next((user for user in users if user is not None), target)
        step = of_target[0].step
        if step is not None:
            opinions[step].append(Opinion(user, reward_of(of_target, policy)))
    return opinions


def verdict(seen: Look, candidate: int, incumbent: int) -> str:
    return (
        f"step {candidate} earned {seen.candidate.mean:.3f} from {counted(seen.candidate.num_users, 'user')} and step {incumbent} "
        f"{seen.incumbent.mean:.3f} from {counted(seen.incumbent.num_users, 'user')} (z {seen.z:.1f}, {seen.num_scored} scored answers)"
    )


def finite(value: float | None) -> float | None:
    """A number that JSON has."""
    return None if value is None else max(-999.0, min(999.0, value))
