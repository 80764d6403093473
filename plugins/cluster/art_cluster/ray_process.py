"""Has Ray place hosts (`art-server host`) for a server, and starts a host again when it is lost.

    python -m art_cluster.ray_process

The server starts this process (`art_server/machines/placing.py`) and writes a `Placing` to its stdin. If Ray cannot place the hosts, the process
writes the reason to stdout. The process is the driver of a job of Ray: the hosts end when the driver or Ray's head ends. The
server itself never imports Ray.
"""

import asyncio
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn
from urllib.parse import urlsplit

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from art_protocol.display import counted
from art_server.machines.placing import CANNOT, Placing
from art_server.process.children import PARENT_VARIABLE, be_child, claim_stdout

logger = logging.getLogger("art_cluster.ray_process")

CONNECT_SECONDS = 20.0
"""Limit for Ray's answer at an address; Ray itself tries for minutes."""
AGAIN_SECONDS = 5.0
"""The pause before a lost host is started again. A host of an earlier server may still run for this long."""
TRIES = 2
"""A host that fails to join this many times at the start will never join."""
ROOM_SECONDS = 30.0
"""The pause between two lines in the log while other jobs use the resources."""
STORE_BYTES = 100 * 2**20
"""The size of Ray's object store, which nobody uses. Ray demands 75 MB."""
ANYWHERE = {"0.0.0.0", "::"}
"""Addresses with which a server listens on all networks."""

Bundle = dict[str, float]
"""Amounts of Ray's resources: `{"CPU": 1.0, "GPU": 1.0}`."""


class Impossible(Exception):
    """Ray cannot place the hosts; the text is one sentence."""


@ray.remote
class HostActor:
    """Runs `art-server host` on the machine that Ray has chosen. The host ends with this actor. The actor imports no code of ours:
    on a machine without our package, or with another version, the actor still runs and returns the reason."""

    async def join(self, folder: str, key: str, flags: list[str], parent_variable: str) -> str | None:
        """Starts the host. Returns None when the host has joined, else why the host ended."""
        file = self._write_key(folder, key)
        # Ray sets OMP_NUM_THREADS to the CPUs of the actor. The host's engines and ranks use more cores.
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "art_server", "host", "--token-file", file, "--path", folder, *flags),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**environment, parent_variable: str(os.getpid())},
            start_new_session=True,
        )
        return await self._read(": joined ")

    async def wait(self) -> str | None:
        """Waits until the host ends, and returns the reason."""
        return await self._read(None)

    def _write_key(self, folder: str, key: str) -> str:
        base, file = os.path.dirname(folder), os.path.join(folder, "key")
        os.makedirs(base, mode=0o700, exist_ok=True)
        if os.stat(base).st_uid != os.getuid():
            raise PermissionError(f"{base} belongs to another user: delete it")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as opened:
            opened.write(key)
        return file

    async def _read(self, awaited: str | None) -> str | None:
        text, lines = "", self._process.stderr
        while lines is not None and (line := await lines.readline()):
            text = line.decode(errors="replace").rstrip()
            print(text, file=sys.stderr, flush=True)  # into Ray's log of this actor
            if awaited is not None and awaited in text:
                return None
        return f"{text} (status {await self._process.wait()})"


class PlacedHosts:
    """The hosts of a server. Each host has its own bundle of a placement group."""

    def __init__(self, placing: Placing, url: str):
        self._placing = placing
        self._url = url
        self._waiting: set[str] = set()
        """The names of hosts that have not joined yet."""

    async def keep(self) -> NoReturn:
        """Keeps all hosts running.

        Raises:
            Impossible: Ray has no room for the hosts, or they cannot join.
        """
        engine, gang = bundles(self._placing, ray.cluster_resources())
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not has_room(nodes, engine, self._placing.engines, gang):
            raise Impossible(
                f"{self._requirement(engine, gang)}, and Ray has {text_of(nodes)}, of which "
                f"{text_of([ray.available_resources()])} are free: use fewer, or add machines to Ray"
            )
        engines = placement_group([engine] * self._placing.engines, "SPREAD") if self._placing.engines else None
        ranks = placement_group([gang], "STRICT_PACK") if gang else None
        for group in (engines, ranks):
            while group is not None and not await asyncio.to_thread(group.wait, ROOM_SECONDS):
                logger.warning("%s; free are %s: waiting", self._requirement(engine, gang), ray.available_resources())
        async with asyncio.TaskGroup() as tasks:
            if ranks is not None:
                flags = ["--engines", "0", "--ranks", str(self._placing.ranks)]
                tasks.create_task(self._keep("ray-ranks", ranks, 0, gang, flags))
            for number in range(self._placing.engines):
                assert engines is not None
                flags = ["--engines", "1", "--ranks", "0"]
                tasks.create_task(self._keep(f"ray-engine-{number}", engines, number, engine, flags))
        raise AssertionError("no host ends for good")

    def _requirement(self, engine: Bundle, gang: Bundle) -> str:
        """Such as "--cluster: room is needed for 2 engines with 1 CPU, 1 GPU each and 4 ranks with 4 CPU, 4 GPU on one
        machine"."""
        num_engines, num_ranks = self._placing.engines, self._placing.ranks
        engines = f"{counted(num_engines, 'engine')} with {text_of([engine])} each" if num_engines else ""
        ranks = f"{counted(num_ranks, 'rank')} with {text_of([gang])} on one machine" if gang else ""
        return f"--cluster: room is needed for {' and '.join(filter(None, (engines, ranks)))}"

    async def _keep(self, name: str, group: PlacementGroup, index: int, bundle: Bundle, flags: list[str]) -> NoReturn:
        folder = os.path.join(tempfile.gettempdir(), f"art-hosts-{os.getuid()}", f"{self._placing.number}-{name}")
        arguments = (folder, self._placing.key, ["--join", self._url, "--name", name, *flags], PARENT_VARIABLE)
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        nodes = (await asyncio.to_thread(placement_group_table, group))["bundles_to_node_id"]
        logger.info("%s is placed on %s", name, nodes[index][:8])
        self._waiting.add(name)
        tries = 0
        while True:
            actor: Any = HostActor.options(  # Any: Ray makes its methods
                scheduling_strategy=strategy, num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0)
            ).remote()
            try:
                if (reason := await actor.join.remote(*arguments)) is None:
                    logger.info("%s has joined", name)
                    self._waiting.discard(name)
                    reason = await actor.wait.remote()
                else:
                    tries += 1
            except RayTaskError as error:
                reason, tries = str(error.cause), tries + 1
            except RayError as error:
                reason = str(error).partition("\n")[0]
            if self._waiting and tries >= TRIES:
                raise Impossible(f"--cluster: the host {name} cannot join: {reason}")
            logger.warning("%s has ended, and is started again: %s", name, reason)
            ray.kill(actor)
            await asyncio.sleep(AGAIN_SECONDS)


def bundles(placing: Placing, cluster: Mapping[str, float]) -> tuple[Bundle, Bundle]:
    """The resources of one engine, and the resources of all ranks together; empty without ranks.

    Where the cluster has GPUs, each engine and each rank gets one GPU.
    """
    single: Bundle = {"CPU": 1.0, "GPU": 1.0} if cluster.get("GPU") else {"CPU": 1.0}
    gang = {name: amount * placing.ranks for name, amount in single.items()} if placing.ranks else {}
    return single, gang


def has_room(nodes: Sequence[Mapping[str, float]], engine: Bundle, engines: int, gang: Bundle) -> bool:
    """Whether the machines could hold all engines and the gang of ranks if nothing else used them. A gang needs one machine."""

    def slots(node: Mapping[str, float], used: Bundle) -> int:
        return int(min((node.get(name, 0.0) - used.get(name, 0.0)) // size for name, size in engine.items()))

    for gang_index, gang_node in enumerate(nodes):
        if any(gang_node.get(name, 0.0) < size for name, size in gang.items()):
            continue
        num_slots = [slots(node, gang if index == gang_index else {}) for index, node in enumerate(nodes)]
        if sum(num_slots) >= engines:
            return True
    return False


def text_of(nodes: Sequence[Mapping[str, float]]) -> str:
    """Processors and GPUs of machines, such as "16 CPU, 8 GPU and 16 CPU, 8 GPU"."""
    shown = [", ".join(f"{node[name]:g} {name}" for name in ("CPU", "GPU") if name in node) or "none" for node in nodes]
    return " and ".join(shown)


def connect(placing: Placing) -> None:
    """Joins Ray at its address, or starts Ray on this machine.

    Raises:
        Impossible: Ray's address does not answer, or Ray does not accept this machine.
    """
    try:
        if placing.address is not None:
            ray.init(address=placing.address, log_to_driver=False)
            return
        # On a CPU engines and ranks share the cores: Ray must count one for each of them.
        num_cpus = max(os.cpu_count() or 1, placing.engines + placing.ranks)
        ray.init(
            address="local",
            num_cpus=num_cpus,
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=placing.temp_dir,
        )
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise Impossible(
            f"--cluster {placing.address or 'auto'}: {' '.join(str(error).split())}: this machine must be a node of that Ray, "
            "with the same versions of Ray and Python and the same token"
        ) from error


def reachable(url: str) -> str:
    """The server's address as machines of Ray reach it: `'http://0.0.0.0:7623' -> 'http://10.0.0.1:7623'`.

    Raises:
        Impossible: the server listens on loopback, and Ray has other machines.
    """
    parts, own = urlsplit(url), ray.util.get_node_ip_address()
    others = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]} - {own, "127.0.0.1"}
    if parts.hostname in ANYWHERE:
        shown = f"[{own}]" if ":" in own else own
        return f"http://{shown}:{parts.port}"
    if others and parts.hostname in ("127.0.0.1", "localhost", "::1"):
        raise Impossible(
            f"--host {parts.hostname}: Ray's machines {', '.join(sorted(others))} cannot reach it: use --host 0.0.0.0 with keys"
        )
    return url


def main() -> None:
    be_child()
    answers = claim_stdout()
    placing = Placing.model_validate_json(sys.stdin.read())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def fail(sentence: str) -> NoReturn:
        answers.write(sentence.encode())
        answers.flush()
        # Also in the timer's thread, where `sys.exit` would end that thread alone.
        os._exit(CANNOT)

    late = f"--cluster {placing.address}: no Ray answered there within {CONNECT_SECONDS:.0f} s: check address and token"
    timer = threading.Timer(CONNECT_SECONDS, fail, [late])
    timer.daemon = True
    if placing.address is not None:
        timer.start()
    try:
        connect(placing)
        timer.cancel()
        asyncio.run(PlacedHosts(placing, reachable(placing.url)).keep())
    # `keep` raises a group, because of its TaskGroup. `except*` takes a bare exception, too.
    except* Impossible as group:
        fail(str(group.exceptions[0]))


if __name__ == "__main__":
    main()
