"""Has Ray place hosts (`art-server host`) for a server, and places again what is lost.

    python -m art_cluster.ray_process

The server starts it (`placing.py`), writes a `Placing` to its stdin, and reads from its stdout why it cannot go on. It is the
driver of a job of Ray: when it ends, or Ray's head, so do its hosts. The server itself never imports Ray.
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

from art_cluster.placing import CANNOT, Placing
from art_server.process.children import PARENT_VARIABLE, be_child, claim_stdout

logger = logging.getLogger("art_cluster.ray_process")

CONNECT_SECONDS = 20.0
"""Limit for Ray's answer at an address; Ray itself tries for minutes."""
AGAIN_SECONDS = 5.0
"""Between two hosts in one place. As long as this one of an earlier server may live on."""
TRIES = 2
"""A host that is refused as often as this at the start will never join."""
ROOM_SECONDS = 30.0
"""Between two lines in the log while others use what is asked."""
STORE_BYTES = 100 * 2**20
"""Of an object store that nobody uses; Ray demands 75 MB."""
ANYWHERE = {"0.0.0.0", "::"}

Bundle = dict[str, float]


class Impossible(Exception):
    """Ray cannot do what is asked: one sentence."""


@ray.remote
class HostActor:
    """Runs `art-server host` where Ray has placed it. It ends with this actor. No code of ours runs in the actor itself, so that
    a machine without it, or with another version, says so."""

    async def join(self, folder: str, key: str, flags: list[str], parent_variable: str) -> str | None:
        """Starts it. Returns None when it has joined, or why it ended."""
        file = self._write_key(folder, key)
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "art_server.cli", "host", "--token-file", file, "--path", folder, *flags),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**environment, parent_variable: str(os.getpid())},
            start_new_session=True,
        )
        return await self._read(": joined ")

    async def wait(self) -> str | None:
        """Why it ended."""
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


class Places:
    """The hosts of a server, each with a place of its own."""

    def __init__(self, given: Placing, url: str):
        self._given = given
        self._url = url
        self._waiting: set[str] = set()
        """Those that have not joined yet."""

    async def keep(self) -> NoReturn:
        """Has all hosts run.

        Raises:
            Impossible: there is no room for them, or they cannot join.
        """
        engine, gang = bundles(self._given, ray.cluster_resources())
        nodes = [each["Resources"] for each in ray.nodes() if each["Alive"]]
        if not has_room(nodes, engine, self._given.engines, gang):
            raise Impossible(
                f"{self._wish(engine, gang)}, and Ray has {text_of(nodes)}, of which {text_of([ray.available_resources()])} are "
                "free: use fewer, or add machines to Ray"
            )
        engines = placement_group([engine] * self._given.engines, "SPREAD") if self._given.engines else None
        ranks = placement_group([gang], "STRICT_PACK") if gang else None
        for group in (engines, ranks):
            while group is not None and not await asyncio.to_thread(group.wait, ROOM_SECONDS):
                logger.warning("%s; free are %s: waiting", self._wish(engine, gang), ray.available_resources())
        async with asyncio.TaskGroup() as tasks:
            if ranks is not None:
                flags = ["--engines", "0", "--ranks", str(self._given.ranks)]
                tasks.create_task(self._keep("ray-ranks", ranks, 0, gang, flags))
            for number in range(self._given.engines):
                assert engines is not None
                flags = ["--engines", "1", "--ranks", "0"]
                tasks.create_task(self._keep(f"ray-engine-{number}", engines, number, engine, flags))
        raise AssertionError("no host ends for good")

    def _wish(self, engine: Bundle, gang: Bundle) -> str:
        each = f"{self._given.engines} engines need {text_of([engine])} each" if self._given.engines else ""
        whole = f"{self._given.ranks} ranks {text_of([gang])} on one machine" if gang else ""
        return f"--cluster: {' and '.join(filter(None, (each, whole)))}"

    async def _keep(self, name: str, group: PlacementGroup, index: int, bundle: Bundle, flags: list[str]) -> NoReturn:
        folder = os.path.join(tempfile.gettempdir(), f"art-hosts-{os.getuid()}", f"{self._given.number}-{name}")
        arguments = (folder, self._given.key, ["--join", self._url, "--name", name, *flags], PARENT_VARIABLE)
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        nodes = (await asyncio.to_thread(placement_group_table, group))["bundles_to_node_id"]
        logger.info("%s is placed on %s", name, nodes[index][:8])
        self._waiting.add(name)
        tries = 0
        while True:
            actor: Any = HostActor.options(  # Any: Ray makes its methods
                scheduling_strategy=place, num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0)
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


def bundles(given: Placing, there: Mapping[str, float]) -> tuple[Bundle, Bundle]:
    """What an engine needs, and what all ranks need; where there are GPUs each has one."""
    each: Bundle = {"CPU": 1.0, "GPU": 1.0} if there.get("GPU") else {"CPU": 1.0}
    return each, {name: number * given.ranks for name, number in each.items()} if given.ranks else {}


def has_room(nodes: Sequence[Mapping[str, float]], engine: Bundle, engines: int, gang: Bundle) -> bool:
    """Whether the machines could hold all of it if nothing else used them."""

    def slots(node: Mapping[str, float], used: Bundle) -> int:
        return int(min((node.get(name, 0.0) - used.get(name, 0.0)) // size for name, size in engine.items()))

    fitting = [place for place, node in enumerate(nodes) if all(node.get(n, 0.0) >= size for n, size in gang.items())]
    return any(
        sum(slots(node, gang if number == place else {}) for number, node in enumerate(nodes)) >= engines
        for place in fitting
    )


def text_of(nodes: Sequence[Mapping[str, float]]) -> str:
    """Processors and GPUs of machines, such as "16 CPU, 8 GPU and 16 CPU, 8 GPU"."""
    shown = [", ".join(f"{node[name]:g} {name}" for name in ("CPU", "GPU") if name in node) or "none" for node in nodes]
    return " and ".join(shown)


def connect(given: Placing) -> None:
    """Joins Ray, or starts it.

    Raises:
        Impossible: its address does not answer, or it does not take this machine.
    """
    try:
        if given.address is not None:
            ray.init(address=given.address, log_to_driver=False)
            return
        # On a CPU engines share the cores.
        num_cpus = max(os.cpu_count() or 1, given.engines + given.ranks)
        ray.init(
            address="local",
            num_cpus=num_cpus,
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=given.temp_dir,
        )
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise Impossible(
            f"--cluster {given.address or 'auto'}: {' '.join(str(error).split())}: this machine must be a node of that Ray, with the "
            "same versions of Ray and Python and the same token"
        ) from error


def reachable(url: str) -> str:
    """The server's address as machines of Ray reach it.

    Raises:
        Impossible: it listens on loopback, and Ray has other machines.
    """
    parts, own = urlsplit(url), ray.util.get_node_ip_address()
    others = {each["NodeManagerAddress"] for each in ray.nodes() if each["Alive"]} - {own, "127.0.0.1"}
    if parts.hostname in ANYWHERE:
        return f"http://{f'[{own}]' if ':' in own else own}:{parts.port}"
    if others and parts.hostname in ("127.0.0.1", "localhost", "::1"):
        raise Impossible(
            f"--host {parts.hostname}: Ray's machines {', '.join(sorted(others))} cannot reach it: use --host 0.0.0.0 with keys"
        )
    return url


def main() -> None:
    be_child()
    answers = claim_stdout()
    given = Placing.model_validate_json(sys.stdin.read())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def fail(sentence: str) -> NoReturn:
        answers.write(sentence.encode())
        answers.flush()
        os._exit(CANNOT)

    late = f"--cluster {given.address}: no Ray answered there within {CONNECT_SECONDS:.0f} s: check address and token"
    timer = threading.Timer(CONNECT_SECONDS, fail, [late])
    timer.daemon = True
    if given.address is not None:
        timer.start()
    try:
        connect(given)
        timer.cancel()
        asyncio.run(Places(given, reachable(given.url)).keep())
    except* Impossible as group:
        fail(str(group.exceptions[0]))


if __name__ == "__main__":
    main()
