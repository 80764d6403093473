"""What a server and a machine that has joined it say to each other: one JSON message each, over one WebSocket.

The machine (the host) sends a greeting and gets a welcome or a refusal. Then the server gives typed orders, of which some have
a reply, and the host reports what its processes do. Either side ends the connection after `SILENCE_SECONDS` without a message.
Files pass beside it, as HTTP requests of the host.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from art_server.process.shared.trainer_messages import WorkerConfig

PATH = "/api/hosts"
JOIN, RECORDS, FILES, FOLDERS = (f"{PATH}/{each}" for each in ("join", "records", "files", "folders"))
"""The WebSockets for orders and for an engine's records, files for the host, and folders that it sends."""
DIGEST_HEADER = "x-art-digest"

BEAT_SECONDS = 2.0
"""Each side sends something at least this often."""
STALL_SECONDS = 15.0
"""For so long a network may carry nothing, and nothing happens."""
SILENCE_SECONDS = 2 * (STALL_SECONDS + BEAT_SECONDS)
"""After this long without a message each side takes the other one for lost. TCP sends again after pauses that double, so that a
connection may be silent for twice as long as its network was."""
REPLY_SECONDS = 60.0
"""Limit for a reply that needs no large file."""
REACH_SECONDS = SILENCE_SECONDS
"""Limit for a connection between the two, which waits for a network that stalls as well."""


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


# --- from the host ---


class Greeting(Message):
    """What a machine offers."""

    name: str
    address: str
    """By which the server reaches it: that of its side of the connection."""
    port: int
    """At which it listens, so that the server can try."""
    device: Literal["cpu", "cuda"]
    without_bfloat16: str
    """The name of a GPU without bfloat16; empty if all have bfloat16."""
    engines: int
    ranks: int
    versions: dict[str, str]
    """Of what must be equal on all machines."""


class Reply(Message):
    kind: Literal["reply"] = "reply"
    number: int = 0
    """Of the order."""
    error: str = ""
    """Why it was not obeyed; empty if it was."""
    path: str = ""
    port: int = 0
    pid: int = 0


class Output(Message):
    """Text that a child has written."""

    kind: Literal["output"] = "output"
    child: str
    text: str
    is_log: bool
    """Of its log; else a line of its standard output."""


class Ended(Message):
    kind: Literal["ended"] = "ended"
    child: str
    status: int


class Beat(Message):
    """The host lives."""

    kind: Literal["beat"] = "beat"
    work: dict[str, str] = {}
    """The work counters of each engine, in hexadecimal digits."""
    cpu_seconds: dict[str, float] = {}
    """Of each rank."""
    at: float
    """When they were read, on the host's clock. Beats come late, and several at once, when the network has stalled."""


# --- from the server ---


class Welcome(Message):
    kind: Literal["welcome"] = "welcome"


class Refusal(Message):
    """The host cannot join, or no longer belongs to the server."""

    kind: Literal["refusal"] = "refusal"
    reason: str


class Order(Message):
    number: int = 0


class UseBase(Order):
    """Find a base model, and compare its files."""

    kind: Literal["base"] = "base"
    name: str
    digests: dict[str, str]
    template: str | None
    """The content of `--chat-template`."""


class StartEngine(Order):
    kind: Literal["engine"] = "engine"
    child: str
    slot: int
    """Which of the host's engines."""
    base: str
    settings: dict[str, Any]
    """Those of the server that concern an engine (`ServerConfig`)."""
    secret: str
    """With which the engine's port is asked."""


class StartRank(Order):
    kind: Literal["rank"] = "rank"
    child: str
    slot: int
    base: str
    worker: WorkerConfig


class Write(Order):
    """A line for a rank."""

    kind: Literal["write"] = "write"
    child: str
    line: str


class Cancel(Order):
    """Have a rank end its job before the next micro-batch."""

    kind: Literal["cancel"] = "cancel"
    child: str


class End(Order):
    """Kill a child with all processes that it spawned."""

    kind: Literal["end"] = "end"
    child: str


class Put(Order):
    """Make a folder of files, which the host has or fetches, or an empty one."""

    kind: Literal["put"] = "put"
    folder: str
    files: dict[str, str]
    """Digests by name."""


class Send(Order):
    """Send the files of a folder."""

    kind: Literal["send"] = "send"
    folder: str
    ticket: str
    """Under which the server takes them."""


class Drop(Order):
    kind: Literal["drop"] = "drop"
    folder: str


class FreePort(Order):
    kind: Literal["port"] = "port"


class Alive(Order):
    """The server lives."""

    kind: Literal["alive"] = "alive"


AnyOrder = UseBase | StartEngine | StartRank | Write | Cancel | End | Put | Send | Drop | FreePort | Alive
FROM_HOST = TypeAdapter[Reply | Output | Ended | Beat](
    Annotated[Reply | Output | Ended | Beat, Field(discriminator="kind")]
)
"""After the greeting."""
FROM_SERVER = TypeAdapter[Welcome | Refusal | AnyOrder](
    Annotated[Welcome | Refusal | AnyOrder, Field(discriminator="kind")]
)
