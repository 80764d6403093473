"""Jobs in a queue, without a server."""

from art_protocol.history import pack_rows
from art_protocol.wire import (
    JobReport,
    TrainConfig,
)
from art_server.jobs.job_row import JobRow, Payload
from art_server.jobs.queue import JobQueue
from art_server.process.shared.trainer_messages import (
    Batch,
    Distribution,
    TokenSequence,
    TrainableGroup,
    TrainableTrajectory,
)

SEQUENCE = TokenSequence(token_ids=[1, 2, 3], logprobs=[None, -0.5, -0.25])


GROUP = TrainableGroup(trajectories=[TrainableTrajectory(reward=1.0, sequences=[SEQUENCE])])


PAYLOAD = Payload.make(
    Batch(groups=[GROUP, GROUP], distributions=[Distribution(temperature=0.5)]),
    pack_rows([{"trajectories": [{"reward": 1.0, "messages": []}], "metadata": {"a": 1}}]),
)


def request_digest(body: bytes) -> str:
    return f"of {body!r}"


def add(queue: JobQueue, key: str | None = None, name: str = "a", body: bytes = b"x", project: str = "p") -> JobRow:
    return queue.insert(project, name, key, request_digest(body), TrainConfig(), PAYLOAD, JobReport(num_rows=1))
