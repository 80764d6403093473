"""The ranks of a trainer: processes that compute the micro-batches of one job together.

Every rank gets the whole job and plans it as the first rank decides (`agreement.py`). The planned micro-batches are divided
among the ranks, each of them whole. Two things are summed over the ranks: the adapter's gradient, before the clip, and the
numbers of each token, which are zero on ranks that did not compute the token. All denominators of the loss count the whole step
(`loss.py`), so the sums equal one process's, but for rounding. The same number of ranks gives the same bits.

A rank never decides alone. Where it could fail or choose differently (memory, a cancelled job, a check), all ranks agree by
one reduced number, at one line. A rank that ends breaks the sums of the others. The server then ends all ranks and
repeats the job.
"""

import contextlib
import datetime
import fcntl
import math
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from types import TracebackType

import torch
import torch.distributed as dist

from art_server.shared.trainer_messages import difference_of_ranks
from art_server.trainer.memory import is_out_of_memory

WAIT = datetime.timedelta(minutes=25)
"""How long a rank waits for the others: longer than any micro-batch, and less than the server waits for the first progress,
so that ranks that do not reach each other report it. The server ends ranks that hang much earlier."""

WELL, OUT_OF_MEMORY, FAILED = 0.0, 1.0, 2.0
"""How a block ended on a rank (`GangView.together`). The largest number counts for all ranks."""

TCP = "tcp://"


class OtherRankFailed(Exception):
    """Another rank failed, and reports the reason."""


class UnlikeRanks(Exception):
    """The ranks differ in something that must be equal on all of them. Nothing was trained."""


class NoMemoryOnSomeRank(MemoryError):
    """A rank ran out of memory, and all ranks know that."""


class GangView:
    """One rank's view of all. A gang of one computes everything and waits for nobody."""

    def __init__(self, rank: int = 0, size: int = 1, *, is_sharded: bool = False, machines: Sequence[str] = ()) -> None:
        self.rank = rank
        self.size = size
        self.machines = machines
        """The machine of each rank, for messages."""
        self.is_sharded = is_sharded
        """Whether the ranks share the base's weights, so that each forward and backward pass needs all of them."""

    @classmethod
    def join(
        cls,
        rank: int,
        size: int,
        meeting: str,
        device: torch.device,
        *,
        is_sharded: bool,
        machine: str,
    ) -> "GangView":
        """Waits until all ranks have joined. `meeting` is a file on this machine, new for each gang; for ranks on several
        machines it is `tcp://ADDRESS:PORT` of the first machine.
        """
        # Gradients are summed on the cards; texts, flags and the tokens' numbers in main memory.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if meeting.startswith(TCP):
            address, _, port = meeting.removeprefix(TCP).rpartition(":")
            # Both libraries would choose an interface by themselves, which need not reach the other machines.
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface_to(address)
            store: dist.Store = dist.TCPStore(address, int(port), size, is_master=rank == 0, timeout=WAIT)
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            store = dist.FileStore(meeting, size)
        # torch's FileStore waits five minutes by default.
        store.set_timeout(WAIT)
        machines = _exchange(store, "machine", machine, rank, size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=WAIT)
        return cls(rank, size, is_sharded=is_sharded, machines=machines)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files."""
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' values, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def of_first(self, values: torch.Tensor) -> torch.Tensor:
        """The first rank's values, in place: for numbers that each rank computes, and whose last bits may differ."""
        if self.size > 1:
            dist.broadcast(values, 0)
        return values

    def gather(self, text: str) -> list[str]:
        """The text of each rank."""
        if self.size == 1:
            return [text]
        data = text.encode()
        # `all_gather` takes tensors of one size, so the lengths come first.
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]))
        longest = max(1, *map(int, lengths))
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(texts, torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8))
        return [bytes(padded[: int(length)].tolist()).decode() for padded, length in zip(texts, lengths, strict=True)]

    def most(self, value: float) -> float:
        """The largest of the ranks' values; infinity if one of them is not a number, because a reduced maximum may lose it."""
        if self.size == 1:
            return value
        values = torch.tensor([math.inf if math.isnan(value) else value], dtype=torch.float64)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return float(values)

    def any(self, value: bool) -> bool:
        """Whether the value is true on some rank."""
        return self.most(1.0 if value else 0.0) > 0

    def meet(self) -> None:
        """Returns when all ranks have come here."""
        self.most(0.0)

    def rounds(self, loads: Sequence[int]) -> list[tuple[int, bool]]:
        """The micro-batches that this rank computes, by index, the largest first, and whether they count.

        `loads` are the micro-batches' numbers of tokens. Ranks that share the base's weights make equally many passes: a rank
        with fewer micro-batches repeats the smallest of all, and the repetition does not count.
        """
        if self.size == 1:
            return [(index, True) for index in range(len(loads))]
        shares = self.shares(loads)
        own = [(index, True) for index in shares[self.rank]]
        if self.is_sharded:
            smallest = min(range(len(loads)), key=lambda index: (loads[index], -index))
            own += [(smallest, False)] * (max(map(len, shares)) - len(own))
        return own

    def shares(self, loads: Sequence[int]) -> list[list[int]]:
        """The micro-batches of each rank, by index, the largest first. Each micro-batch goes to the rank with
        the fewest tokens so far."""
        shares: list[list[int]] = [[] for _ in range(self.size)]
        tokens = [0] * self.size
        # `sorted` is stable and `index` finds the first minimum: equal loads are divided in the same way on all ranks.
        for index in sorted(range(len(loads)), key=lambda index: -loads[index]):
            least = tokens.index(min(tokens))
            shares[least].append(index)
            tokens[least] += loads[index]
        return shares

    def together(self) -> "_Together":
        """A block that all ranks leave in the same way: if it fails on one rank, it raises on every rank.

        If a rank runs out of memory, all ranks raise NoMemoryOnSomeRank, and may try again with less. Ranks that share the
        base's weights are an exception: the others wait inside the block for the rank that failed. This rank raises alone,
        and the server ends the others.

        Raises:
            NoMemoryOnSomeRank: this rank or another one ran out of memory.
            OtherRankFailed: another rank failed otherwise.
        """
        return _Together(self)


class _Together:
    def __init__(self, gang: GangView) -> None:
        self._gang = gang

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gang = self._gang
        if gang.size == 1 or (error is not None and gang.is_sharded):
            return
        own = WELL
        if error is not None:
            own = OUT_OF_MEMORY if isinstance(error, Exception) and is_out_of_memory(error) else FAILED
        worst = gang.most(own)
        if worst == FAILED and own != FAILED:
            raise OtherRankFailed("another rank failed")
        if worst == OUT_OF_MEMORY:
            raise NoMemoryOnSomeRank(str(error or "another rank ran out of memory")) from error


def _exchange(store: dist.Store, name: str, text: str, rank: int, size: int) -> list[str]:
    """The text of each rank, through a store, for ranks without a process group. Waits for all ranks."""
    store.set(f"{name}-{rank}", text)
    texts = [store.get(f"{name}-{other}").decode() for other in range(size)]
    store.set(f"{name}-read-by-{rank}", "")
    # The first rank's process may hold the store, and may end before the others have read it.
    store.wait([f"{name}-read-by-{other}" for other in range(size)], WAIT)
    return texts


def check_alike(machines: Sequence[str], facts: Sequence[Mapping[str, str]]) -> None:
    """Checks that all ranks have the same facts, by name.

    Raises:
        UnlikeRanks: the facts differ.
    """
    if (difference := difference_of_ranks(machines, facts)) is not None:
        raise UnlikeRanks(difference)


def is_lost_connection(error: Exception) -> bool:
    """Whether the ranks could not speak to each other: another rank has ended, or the network between them broke. Gloo raises
    a plain RuntimeError."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def interface_to(address: str) -> str:
    """The network interface by which this machine reaches an address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no address
                reply = fcntl.ioctl(probe, GET_ADDRESS, struct.pack("256s", name.encode()))
                # struct ifreq: 16 bytes of name, then family and port, then the IPv4 address.
                if reply[20:24] == own:
                    return name
    raise OSError(f"no network interface of this machine reaches {address}")


GET_ADDRESS = 0x8915
"""SIOCGIFADDR (netdevice(7))."""

ALONE = GangView()
