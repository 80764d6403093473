"""`SkyPilotBackend`: an art-server on a machine that SkyPilot rents, reached through an SSH tunnel.

sky.yaml beside this file defines what the machine runs. No port of the machine is opened. SkyPilot's calls block, so
they run in threads.
"""

import asyncio
import contextlib
import functools
import io
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from subprocess import DEVNULL, PIPE
from typing import Any, Self

import art
from art.errors import ArtConnectionError, ArtError
from art.reporting import OnStep
from art.skypilot.task import TASK_NAME, import_sky, make_task, read_environment
from art.skypilot.tunnel import Tunnel, run_process, run_ssh
from art_protocol.wire import Health

logger = logging.getLogger(__name__)

SERVER_PORT = 7623
READ_KEY = "cat art/api-key"
"""Prints the API key, which the task's `run` wrote to this file."""
SKY = [sys.executable, "-c", "from sky.cli import cli; cli()"]
"""SkyPilot's command line. SkyPilot's Python interface cannot write an entry to ~/.ssh/config, nor stop following a log."""
ENDED = ("SUCCEEDED", "FAILED", "FAILED_SETUP", "FAILED_DRIVER", "CANCELLED")
"""The job statuses in which no server runs."""


class SkyPilotBackend(art.Backend):
    """An art-server on a SkyPilot cluster. `initialize_cluster` makes a backend.

    `close` ends the connection; the machine keeps running. `down` gives back the machine and its disk.
    """

    _poll_seconds = 5.0

    def __init__(
        self,
        cluster_name: str = "art",
        *,
        trackers: Sequence[str] = (),
        on_step: OnStep | None = None,
    ) -> None:
        # The tunnel's address replaces this one in `_open_tunnel`.
        super().__init__("http://127.0.0.1:0", trackers=trackers, on_step=on_step)
        self._cluster_name = cluster_name
        self._sky = import_sky()
        self._launching: str | None = None
        """SkyPilot's request id of a running launch."""
        self._tunnel: Tunnel | None = None
        self._has_ended_server = False

    @classmethod
    async def initialize_cluster(
        cls,
        *,
        cluster_name: str = "art",
        gpu: str | None = None,
        resources: Any = None,
        art_version: str | None = None,
        env_path: str | os.PathLike[str] | None = None,
        force_restart: bool = False,
        tail_logs: bool = True,
        start_timeout_seconds: float = 3600,
        trackers: Sequence[str] = (),
        on_step: OnStep | None = None,
    ) -> Self:
        """Launches the cluster, or connects to the existing cluster of this name, and returns when the server answers.

        `gpu` is a name such as "H100" or "H100:2". `resources` (sky.Resources) replaces the resources in sky.yaml. The
        server is installed from the checkout in the folder `art_version`, else from the checkout of this client, else
        as the release of this client's version. The variables of the file `env_path` are set on the machine, as
        secrets. `force_restart` ends a running server and starts a new one. `start_timeout_seconds` limits installing
        and starting, not the search for a machine. `trackers` and `on_step` work as in `Backend`.

        If the call fails, a machine that the call rented is given back, and a machine that the call restarted is stopped
        again.

        Raises:
            ImportError: SkyPilot is not installed. SkyPilot's own exceptions are raised unchanged.
            ArtError: the server does not start.
        """
        backend = cls(cluster_name, trackers=trackers, on_step=on_step)
        environment = read_environment(env_path)
        key = environment.get("ART_API_KEY") or backend._connection.api_key
        environment["ART_API_KEY"] = key = key or secrets.token_urlsafe(32)
        task = make_task(backend._sky, environment, gpu, resources, art_version)
        before = await backend._fetch_cluster_status()
        async with contextlib.AsyncExitStack() as on_failure:
            on_failure.push_async_exit(functools.partial(backend._after_failure, before))
            job = await backend._find_usable_job(before, force_restart)
            is_new = job is None
            if job is None:
                logger.info("cluster '%s': launching", cluster_name)
                job = await backend._launch(task, tail_logs)
                backend._connection.api_key = key  # /health shows details only to callers with a key
            await backend._open_tunnel()
            await backend._wait_until_ready(job, start_timeout_seconds, tail_logs)
            if not is_new:
                # The server has the key of the program that started it.
                key = (await run_ssh(cluster_name, READ_KEY)).strip()
            backend._connection.api_key = key
            await backend._connection.close()  # the next request opens a client with the key
        logger.info("cluster '%s': ready: %s", cluster_name, backend)
        return backend

    async def down(self) -> None:
        """Closes the connections and gives the machine back. Its disk is deleted, with the checkpoints."""
        await self.close()
        with contextlib.suppress(self._sky.exceptions.ClusterDoesNotExist):
            await self._run_sky(self._sky.down, self._cluster_name)
        logger.info("cluster '%s' is down", self._cluster_name)

    async def close(self) -> None:
        """Closes the connections and the tunnel. The machine keeps running and costs money until `down`."""
        await super().close()
        if self._tunnel is not None:
            self._tunnel.close()
            self._tunnel = None

    def _check_server(self) -> None:
        if self._tunnel is None:
            raise ArtError(
                f"there is no connection to cluster '{self._cluster_name}': this SkyPilotBackend is closed, or was not "
                "made by SkyPilotBackend.initialize_cluster(...)"
            )

    async def _launch(self, task: Any, shows_output: bool) -> int:
        """Rents the machine and starts the task. Returns the job's id."""

        def submit() -> None:
            self._launching = self._sky.launch(task, cluster_name=self._cluster_name)

        submitting = asyncio.ensure_future(asyncio.to_thread(submit))
        try:
            await asyncio.shield(submitting)
        finally:
            await asyncio.wait([submitting])  # only a submitted launch can be cancelled
        follow = self._sky.stream_and_get if shows_output else self._sky.get
        job, _ = await asyncio.to_thread(follow, self._launching)
        self._launching = None
        return job

    async def _open_tunnel(self) -> None:
        await run_process([*SKY, "status", self._cluster_name])  # writes the entry for ssh
        # If ssh cannot connect, this raises its reason. A tunnel would try again without an end.
        await run_ssh(self._cluster_name, "true")
        self._tunnel = Tunnel(self._cluster_name, SERVER_PORT)
        self._connection.base_url = self._tunnel.url

    async def _wait_until_ready(self, job: int, timeout_seconds: float, tail_logs: bool) -> None:
        """Returns when the engine is ready, or will start when the first model is registered."""
        log = asyncio.ensure_future(self._follow_log(job)) if tail_logs else None
        begin, state = time.monotonic(), ""
        try:
            async with asyncio.timeout(timeout_seconds):
                while (logged := state) not in ("engine ready", "engine none"):
                    state = await self._fetch_state(job)
                    if state == logged:
                        await asyncio.sleep(self._poll_seconds)
                        continue
                    seconds = time.monotonic() - begin
                    logger.info("cluster '%s': %s (%.0f s)", self._cluster_name, state, seconds)
        except TimeoutError as error:
            raise ArtError(
                f"art-server on cluster '{self._cluster_name}' was not ready after {timeout_seconds:.0f} s "
                f"(start_timeout_seconds); its state: {state}.\n{await self._fetch_log_tail(job)}"
            ) from error
        finally:
            if log is not None:
                log.cancel()
                await asyncio.gather(log, return_exceptions=True)

    async def _fetch_state(self, job: int) -> str:
        """The job's status, or the engine's once the server answers.

        Raises:
            ArtError: the job has ended, or the engine has failed.
        """
        job_status = (await self._run_sky(self._sky.job_status, self._cluster_name, [job]))[job]
        status = "PENDING" if job_status is None else job_status.value
        if status in ENDED:
            raise ArtError(
                f"art-server on cluster '{self._cluster_name}' ended: {status}.\n{await self._fetch_log_tail(job)}"
            )
        if status != "RUNNING":  # only an earlier server could answer
            return status
        try:
            reply = await self._connection.request("GET", "/health", timeout_seconds=10, reconnect_seconds=0)
        except ArtConnectionError:
            return status
        health = Health.model_validate_json(reply)
        if health.engine == "failed":
            detail = health.detail or await self._fetch_log_tail(job)
            raise ArtError(f"the engine on cluster '{self._cluster_name}' failed: {detail}")
        return f"engine {health.engine}"

    async def _fetch_cluster_status(self) -> str | None:
        """The cluster's status; None if there is no cluster of this name."""
        refresh = self._sky.StatusRefreshMode.AUTO  # queries the cloud: autostop may have acted
        records = await self._run_sky(self._sky.status, [self._cluster_name], refresh=refresh)
        return records[0]["status"].value if records else None

    async def _find_usable_job(self, before: str | None, force_restart: bool) -> int | None:
        """The job of the server to connect to; None if a server must be started. With `force_restart`, ends a server that
        runs."""
        job = await self._find_server_job() if before == "UP" else None
        if job is not None and force_restart:
            await self._run_sky(self._sky.cancel, self._cluster_name, job_ids=[job])
            self._has_ended_server = True
            return None
        return job

    async def _find_server_job(self) -> int | None:
        """The id of the job whose server runs or is being installed; None without such a job."""
        jobs = await self._run_sky(self._sky.queue, self._cluster_name, skip_finished=True, all_users=True)
        return next((job["job_id"] for job in jobs if job["job_name"] == TASK_NAME), None)

    async def _fetch_log_tail(self, job: int) -> str:
        log = io.StringIO()
        name = self._cluster_name
        await asyncio.to_thread(self._sky.tail_logs, name, job, follow=False, tail=40, output_stream=log)
        return f"The end of its log:\n{log.getvalue()}"

    async def _follow_log(self, job: int) -> None:
        """Prints the job's log until the log ends or the task is cancelled."""
        process = await asyncio.create_subprocess_exec(
            *SKY, "logs", self._cluster_name, str(job), stdin=DEVNULL, stdout=PIPE
        )
        assert process.stdout is not None, "stdout is a pipe"
        try:
            while text := await process.stdout.read(65536):
                print(text.decode(errors="replace"), end="", flush=True)
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()

    async def _after_failure(
        self, before: str | None, kind: object, error: BaseException | None, traceback: object
    ) -> None:
        """Undoes a launch that failed or was interrupted, and adds a note about the cluster to the error."""
        if error is not None:
            await self.close()
            error.add_note(await self._undo(before))

    async def _undo(self, before: str | None) -> str:
        """Undoes a failed launch. Returns a sentence about what happened to the cluster."""
        name = self._cluster_name
        if self._launching is not None:
            await self._run_sky(self._sky.api_cancel, [self._launching])
        if before is None:
            logger.warning("cluster '%s': giving it back; if that fails, run: sky down %s", name, name)
            await self.down()
            return f"cluster '{name}' was given back, because it did not exist before"
        if before == "STOPPED":
            logger.warning("cluster '%s': stopping it; if that fails, run: sky stop %s", name, name)
            await self._run_sky(self._sky.stop, name)
            return f"cluster '{name}' was stopped again and keeps its disk: `sky down {name}` gives it back"
        change = "lost its earlier server" if self._has_ended_server else "was not changed"
        return f"cluster '{name}' {change}: see `sky logs {name}`; `sky down {name}` gives it back"

    async def _run_sky(self, request: Callable[..., str], *arguments: Any, **options: Any) -> Any:
        """The result of a SkyPilot request."""
        return await asyncio.to_thread(lambda: self._sky.get(request(*arguments, **options)))
