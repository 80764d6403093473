"""Whether a server is lost. An agent's own client notices a dead server first, and a frozen one looks like slow rollouts."""

import httpx

import art
from art.finetune.agent import reason_of
from art.finetune.errors import NoServer
from art_protocol.proxies import DIRECT

HEALTH_SECONDS = 20.0
"""Limit for the answer to GET /health. A server with all cores busy answers within a few seconds."""


async def is_lost(model: art.TrainableModel) -> bool:
    """Whether the model's server does not answer."""
    try:
        async with httpx.AsyncClient(timeout=HEALTH_SECONDS, mounts=DIRECT) as client:
            await client.get(f"{model.backend().base_url}/health")
    except httpx.TransportError:
        return True
    return False


def server_lost(model: art.TrainableModel, error: Exception) -> NoServer:
    """The error for a server that does not answer. `error` is the first failure that was noticed."""
    url = model.backend().base_url
    return NoServer(
        f"the server at {url} does not answer ({reason_of(error)}). Start it again; `curl {url}/health` shows whether it "
        "answers. The same command continues then"
    )
