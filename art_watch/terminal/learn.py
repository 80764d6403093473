"""`art learn` and `art feedback`: a running server trains a model from scores of its answers."""

import argparse
import json
import sys

from art_protocol.learning import MAX_LINES
from art_server.errors import NotFound, UsageError
from art_watch.terminal.addresses import find_model, need_server
from art_watch.terminal.exports import read_scores
from art_watch.terminal.sources import Row, Source
from art_watch.terminal.text import visible

FIELDS = ("batch", "every_hours", "user_share", "release", "share", "steps_per_release")
"""Fields of a policy that have a flag."""
STATES = {"steps": "refused", "canary": "decided", "rolled_back": "rolled back"}
"""What the newest decision on a release was, by the release's state."""


def learn(source: Source, flags: argparse.Namespace) -> None:
    """Turns learning on or changes it, if a flag says so or it is off, and shows it.

    Raises:
        UsageError: the policy's file cannot be read.
        NotFound, InvalidInput: there is no such model or server, or the policy is wrong.
    """
    server = need_server(source)
    model = find_model(source, flags.model)[0]["id"]
    info = server.learning(model)
    if flags.action is not None:
        info = server.change_learning(model, flags.action)
    else:
        changes = policy_changes(flags)
        if changes or info["state"] == "off":
            info = server.set_policy(model, merged(info["policy"], changes))
    if flags.json:
        print(json.dumps(info))
        return
    counts = ", ".join(f"{number} {state}" for state, number in sorted(info["counts"].items()))
    print(f"{model}: learning is {info['state']}, step {info['serving_step']} serves")
    print(f"{info['reason']}")
    print(f"scores: {counts or 'none yet'}")
    if (release := info.get("release")) is not None and release["reason"] is not None:
        print(f"newest decision: {release['reason']}")


def learning_lines(model: str, info: Row) -> list[str]:
    """A model that learns in one line and, if the line does not say all, what its learning waits for or why it stopped."""
    policy, counts = info["policy"], info["counts"]
    release: Row = info["release"] or {"state": None, "reason": None}
    words = [model, f"serving {info['serving_step']}"]
    if release["state"] == "canary":
        incumbent, candidate = release["arms"]
        words.append(f"canary {release['candidate']} ({release['share']:.0%})")
        if release["z"] is not None:
            words.append(f"{candidate['mean'] - incumbent['mean']:+.2f} (z {release['z']:.1f})")
        words.append(f"{incumbent['scored'] + candidate['scored']} of {policy['looks'][-1]} scores")
    elif release["state"] == "steps" and release["passed"] > release["incumbent"]:
        words.append(f"guarded {release['passed']}")
    words.append(f"waiting {counts.get('scored', 0)} of {policy['batch']}")
    if counts.get("dropped"):
        reasons = {name.removeprefix("dropped: "): count for name, count in counts.items() if ": " in name}
        names = [reason if len(reasons) == 1 else f"{count} {reason}" for reason, count in reasons.items()]
        words.append(f"dropped {counts['dropped']} ({', '.join(names)})")
    lines = ["  ".join(words)]
    if info["state"] == "paused" or release["state"] != "canary":
        lines.append(f"  {info['reason']}")
    if release["reason"] is not None and release["state"] != "promoted":
        lines.append(f"  {STATES[release['state']]}: {release['reason']}")
    return lines


def policy_changes(flags: argparse.Namespace) -> Row:
    """The fields of a policy that the command names."""
    changes: Row = {}
    if flags.policy is not None:
        try:
            changes = json.loads(flags.policy.read_bytes())
        except ValueError as error:
            raise UsageError(f"{flags.policy} is no JSON: {error}") from error
        if not isinstance(changes, dict):
            raise UsageError(f"{flags.policy} is no object with the fields of a policy")
    changes |= {name: getattr(flags, name) for name in FIELDS if getattr(flags, name) is not None}
    if flags.learning_rate is not None:
        changes["config"] = {**changes.get("config", {}), "learning_rate": flags.learning_rate}
    return changes


def merged(policy: Row, changes: Row) -> Row:
    """A policy with changed fields; of its configuration only the fields that are named change."""
    config = {**policy["config"], **changes.get("config", {})}
    return {**policy, **changes, "config": config}


def feedback(source: Source, flags: argparse.Namespace) -> None:
    """Sends the scores of a file, and prints the errors with their lines. Exits with 1 if a score was refused.

    Raises:
        UsageError: the file has no line.
        NotFound, InvalidInput: there is no such model or server.
    """
    server = need_server(source)
    model = find_model(source, flags.model)[0]["id"]
    scores = read_scores(flags.file.read_bytes())
    refused = [(score.where, score.reason) for score in scores if score.body is None]
    bodies = [(score.where, score.body) for score in scores if score.body is not None]
    for start in range(0, len(bodies), MAX_LINES):
        part = bodies[start : start + MAX_LINES]
        results = server.give_feedback(model, [body for _, body in part])
        refused += [
            (where, result["error"]["message"])
            for (where, _), result in zip(part, results, strict=True)
            if "error" in result
        ]
    for where, reason in refused:
        print(visible(f"{flags.file}, {where}: {reason}"), file=sys.stderr)
    num_refused = len(refused)
    print(f"{len(scores) - num_refused} of {len(scores)} scores taken")
    if num_refused:
        raise NotFound(f"{num_refused} scores were refused", code="scores_refused")
