"""The messages between a server and a machine that has joined: one JSON object each, over one WebSocket.

The machine (the host) sends a greeting and gets a welcome or a refusal. Then the server gives typed orders (`joined.py`), which
the host obeys (`obeying.py`). The host replies to some of them, and reports the output and the end of its processes. Either side
ends the connection after `SILENCE_SECONDS` without a message. The host sends and fetches files in separate HTTP requests.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from art_server.shared.trainer_messages import WorkerConfig

PATH = "/api/hosts"
JOIN, RECORDS, FILES, FOLDERS = (f"{PATH}/{name}" for name in ("join", "records", "files", "folders"))
"""The paths of the WebSocket for orders, of the WebSocket for an engine's records, of files that a host fetches, and of folders
that a host sends."""
DIGEST_HEADER = "x-art-digest"

BEAT_SECONDS = 2.0
"""Each side sends something at least this often."""
STALL_SECONDS = 15.0
"""A network may carry nothing for this long, and the connection stays."""
SILENCE_SECONDS = 2 * (STALL_SECONDS + BEAT_SECONDS)
"""After this long without a message each side counts the other side as lost. TCP sends again after pauses that double: a
connection can be silent for twice as long as the network was."""
REPLY_SECONDS = 60.0
"""Limit for a reply that needs no large file."""
REACH_SECONDS = SILENCE_SECONDS
"""Limit for opening a connection between the two sides. The network can stall at this moment too."""


class HostMessage(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


# --- from the host ---


class Greeting(HostMessage):
    """What a machine offers."""

    name: str
    address: str
    """The host's own address on this connection, at which the server reaches the host's ports."""
    port: int
    """A port at which the host listens, so that the server can try to connect."""
    device: Literal["cpu", "cuda"]
    without_bfloat16: str
    """The name of a GPU without bfloat16; empty if all have bfloat16."""
    engines: int
    ranks: int
    versions: dict[str, str]
    """The versions that must be equal on all machines, by package."""


class OrderReply(HostMessage):
    kind: Literal["reply"] = "reply"
    number: int = 0
    """The number of the order."""
    error: str = ""
    """Why the host did not obey the order; empty if the host did."""
    path: str = ""
    """The path of the folder that `Put` has made."""
    port: int = 0
    """The port of the engine that `StartEngine` has started, or a free port for `FreePort`."""
    pid: int = 0
    """The process that `StartEngine` or `StartRank` has started."""


class Output(HostMessage):
    """Text that a child has written."""

    kind: Literal["output"] = "output"
    child: str
    text: str
    is_log: bool
    """Whether the text belongs to the child's log. False: the text is a line of its standard output."""


class Ended(HostMessage):
    kind: Literal["ended"] = "ended"
    child: str
    status: int


class Beat(HostMessage):
    """The host lives."""

    kind: Literal["beat"] = "beat"
    work: dict[str, str] = {}
    """The work counters of each engine, in hexadecimal digits."""
    cpu_seconds: dict[str, float] = {}
    """The processor time of each rank."""
    at: float
    """When the counters were read, on the host's clock. After a stall of the network beats come late, several at once."""


# --- from the server ---


class Welcome(HostMessage):
    kind: Literal["welcome"] = "welcome"


class Refusal(HostMessage):
    """The host cannot join, or no longer belongs to the server."""

    kind: Literal["refusal"] = "refusal"
    reason: str


class Order(HostMessage):
    number: int = 0


class UseBase(Order):
    """Find a base model, and compare its files with the server's digests."""

    kind: Literal["base"] = "base"
    name: str
    digests: dict[str, str]
    template: str | None
    """The content of `--chat-template`."""


class StartEngine(Order):
    kind: Literal["engine"] = "engine"
    child: str
    slot: int
    """The index of the engine on the host."""
    base: str
    settings: dict[str, Any]
    """The server's settings that concern an engine (`ServerConfig`)."""
    secret: str
    """The header value that each request to the engine's port must have."""


class StartRank(Order):
    kind: Literal["rank"] = "rank"
    child: str
    slot: int
    """The index of the rank on the host."""
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
    """Make a folder of files. The host links the files that it has, and fetches the others."""

    kind: Literal["put"] = "put"
    folder: str
    files: dict[str, str]
    """The digest of each file, by name; empty for an empty folder."""


class Send(Order):
    """Send the files of a folder."""

    kind: Literal["send"] = "send"
    folder: str
    ticket: str
    """The ticket under which the server accepts the files."""


class Drop(Order):
    kind: Literal["drop"] = "drop"
    folder: str


class FreePort(Order):
    kind: Literal["port"] = "port"


class Alive(Order):
    """The server lives."""

    kind: Literal["alive"] = "alive"


AnyOrder = UseBase | StartEngine | StartRank | Write | Cancel | End | Put | Send | Drop | FreePort | Alive
FROM_HOST = TypeAdapter[OrderReply | Output | Ended | Beat](
    Annotated[OrderReply | Output | Ended | Beat, Field(discriminator="kind")]
)
"""The host's messages after the greeting."""
FROM_SERVER = TypeAdapter[Welcome | Refusal | AnyOrder](
    Annotated[Welcome | Refusal | AnyOrder, Field(discriminator="kind")]
)
