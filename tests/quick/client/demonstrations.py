"""Demonstrations for `model.train_sft`, and what a call of it sends."""

from typing import Any

import art

TRAIN = "/api/models/demo/agent/train"


def example(text: str, *answers: str) -> art.Trajectory:
    messages: list[Any] = [{"role": "user", "content": text}]
    for answer in answers:
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "more"}]
    return art.Trajectory(messages_and_choices=messages[: 2 * len(answers)])


def sent(server: Any) -> dict[str, Any]:
    return server.sent("POST", TRAIN)[-1].json()
