"""A run that ends in its middle."""

import asyncio
from typing import Any

import pytest

import art.finetune
from plugins.finetune.tests.policy_server import PolicyServer


async def run_until(policy: PolicyServer, file: dict[str, Any], num_asked: int) -> None:
    """Runs until so many answers are asked for, and is cancelled then."""

    def dies(question: str, number: int) -> str:
        if len(policy.asked) == num_asked:
            running.cancel()
        return ("yes", "no")[number % 2]

    policy.answer = dies
    running = asyncio.create_task(art.finetune.run(file))
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(policy.asked) == num_asked
