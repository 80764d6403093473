"""Simulated canaries: users with scores of 0 and 1, and the looks of the default policy."""

import random

from art_protocol.learning import Policy
from art_server.learning.canary import Opinion, due_looks, is_promoted, look

POLICY = Policy(release="canary")


def simulate(
    difference: float, *, seed: int, drift: float = 0.0, per_user: int = 1, spread: float = 0.0
) -> tuple[bool, int]:
    """Whether a canary of a step that earns `difference` more is promoted, and after how many scores. The rate of all users falls by
    `drift` meanwhile; users give `per_user` scores, and their rates differ by `spread`."""
    rng = random.Random(seed)
    arms: tuple[list[Opinion], list[Opinion]] = ([], [])
    num_looks = number = 0
    while True:
        is_new = rng.random() < POLICY.share
        rate = 0.6 + difference * is_new - drift * number / POLICY.looks[-1] + rng.gauss(0.0, spread)
        for _ in range(per_user):
            arms[is_new].append(Opinion(f"u{number}", float(rng.random() < rate)))
        number += per_user
        num_due = due_looks(number, POLICY)
        if num_due > num_looks:
            num_looks = num_due
            verdict = is_promoted(look(*arms), num_due, POLICY)
            if verdict is not None:
                return verdict, number
