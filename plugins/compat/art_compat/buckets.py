"""ART's methods for checkpoints in a bucket and for forks, over `art copy`, `art export` and our fork.

Checkpoints pass through this machine, with this program's credentials of the bucket: the server gets none. The steps are at
BUCKET/[PREFIX/]PROJECT/models/NAME/checkpoints/STEP, as in ART.
"""

# pyright: reportPrivateUsage=false

import asyncio
import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import Any

from art.core import backend as core
from art.core.model import Model
from art.errors import ArtError, ArtStatusError
from art_compat.refused import DEPLOY, refused

logger = logging.getLogger("art.compat")

COMMAND = "from art_watch.terminal.cli import main; main()"
NOTHING_FOUND = 3
"""Exit code of `art copy` if its source is an address without a checkpoint."""
NO_BUCKET = (
    "%s: nothing is copied, because no bucket is named: pass s3_bucket, or set BACKUP_BUCKET. The server keeps the "
    "checkpoints either way"
)


class Buckets(core.Backend):
    """A backend that copies checkpoints under ART's names."""

    async def _start(self) -> None:
        """Starts the server, if that is this backend's task."""

    async def _experimental_push_to_s3(
        self,
        model: Model,
        *,
        s3_bucket: str | None = None,
        prefix: str | None = None,
        verbose: bool = False,
        delete: bool = False,
    ) -> None:
        """Copies the serving step to a bucket. Without a bucket: a warning.

        Raises:
            ArtError: the step could not be copied; the message has the reason.
        """
        address = address_of(model, s3_bucket, prefix)
        if address is None:
            return logger.warning(NO_BUCKET, "_experimental_push_to_s3")
        if delete:
            logger.warning("_experimental_push_to_s3: delete has no effect: the bucket keeps all")
        await self._start()
        step = await self._get_step(model)
        target = f"{address}/{step:04d}"
        await self._run("copy", f"{name_of(model)}@{step}", target, verbose=verbose)

    async def _experimental_pull_from_s3(
        self,
        model: Model,
        *,
        s3_bucket: str | None = None,
        prefix: str | None = None,
        verbose: bool = False,
        delete: bool = False,
        only_step: Any = None,  # Any: int | "latest" | None
        step: int | None = None,
        exclude: Any = None,
        latest_only: bool = False,
    ) -> None:
        """Creates the model on the server from the newest step in a bucket, or from the step `step` or `only_step`. Call this
        method before `register`. Without a bucket: a warning. Does nothing if the bucket has no step of the model, or if the
        server has the step.

        Raises:
            ArtError: the step could not be copied; the message has the reason.
        """
        address = address_of(model, s3_bucket, prefix)
        if address is None:
            return logger.warning(NO_BUCKET, "_experimental_pull_from_s3")
        if delete or exclude:
            logger.warning("_experimental_pull_from_s3: delete and exclude have no effect")
        del latest_only  # only one step is copied
        wanted = step if step is not None else only_step
        source = address if wanted in (None, "latest") else f"{address}/{int(wanted):04d}"
        await self._start()
        if await self._run("copy", source, name_of(model), verbose=verbose) == NOTHING_FOUND:
            logger.info("%s: no checkpoint in %s", model.name, source)

    async def _experimental_pull_model_checkpoint(
        self,
        model: Model,
        *,
        step: Any = None,  # Any: int | "latest" | None
        local_path: str | None = None,
        s3_bucket: str | None = None,
        prefix: str | None = None,
        verbose: bool = False,
    ) -> str:
        """Writes a step's adapter to a folder (default: `.art/PROJECT/models/NAME/checkpoints/STEP`) and returns the
        folder. With a bucket, the step is first copied from the bucket to the server. A folder that has files is kept.

        Raises:
            ArtError: the step could not be copied; the message has the reason.
        """
        if s3_bucket is not None:
            await self._experimental_pull_from_s3(
                model, s3_bucket=s3_bucket, prefix=prefix, verbose=verbose, only_step=step
            )
        await self._start()
        if step in (None, "latest"):
            step = await self._get_step(model)
        default = Path(".art", model.project, "models", model._storage_name, "checkpoints")
        folder = Path(local_path) if local_path is not None else default / f"{step:04d}"
        if not folder.is_dir() or not any(folder.iterdir()):
            await self._run("export", f"{name_of(model)}@{step}", str(folder), verbose=verbose)
        return str(folder)

    async def _experimental_fork_checkpoint(
        self,
        model: Model,
        from_model: str,
        from_project: str | None = None,
        from_s3_bucket: str | None = None,
        not_after_step: int | None = None,
        verbose: bool = False,
        prefix: str | None = None,
    ) -> None:
        """Creates the model from another model's newest step that is not after `not_after_step`. Call this
        method before `register`. With a bucket, this step is first copied from the bucket, unless the server has the step
        `not_after_step` already.

        Raises:
            ArtError: the other model or step is unknown, or the model exists.
        """
        source = Model(name=from_model, project=from_project or model.project)
        address = address_of(source, from_s3_bucket, prefix) if from_s3_bucket else None
        await self._start()
        if address is not None and not await self._has_step(source, not_after_step):
            limit = [] if not_after_step is None else [f"--not-after={not_after_step}"]
            await self._run("copy", address, name_of(source), *limit, verbose=verbose)
        known = [checkpoint.step for checkpoint in (await self._list_checkpoints(source)).checkpoints]
        steps = [step for step in known if not_after_step is None or step <= not_after_step]
        if not steps:
            raise ArtError(
                f"'{from_model}' has no step up to {not_after_step}; its steps: {known}. Keep more steps with "
                "art-server --keep-last"
            )
        await self._fork(source, model._storage_name, model.project, max(steps))

    async def _has_step(self, model: Model, step: int | None) -> bool:
        with contextlib.suppress(ArtStatusError):  # the server may not know the model yet
            known = await self._list_checkpoints(model)
            return any(checkpoint.step == step for checkpoint in known.checkpoints)
        return False

    async def _experimental_deploy(self, *_: Any, **__: Any) -> None:
        """Not here: raises NotImplementedError, whose message names our way."""
        refused("_experimental_deploy", DEPLOY)()

    async def _run(self, *arguments: str, verbose: bool) -> int:
        """Runs `art` against this backend's server, and returns 0 or NOTHING_FOUND."""
        key = self._connection.api_key
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", COMMAND, *arguments, "--url", self._connection.base_url),
            # `art` reads its key from this variable only. Other users can see a process's arguments.
            env=os.environ | ({"ART_API_KEY": key} if key else {}),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            output, errors = await process.communicate()
        except asyncio.CancelledError:
            process.kill()
            raise
        assert process.returncode is not None
        if process.returncode not in (0, NOTHING_FOUND):
            reason = errors.decode(errors="replace").strip()
            if "No module named 'art_server'" in reason:
                reason = "it needs pip install '.[server,s3]' in a clone of the repository"
            raise ArtError(f"art {' '.join(arguments)} failed: {reason}")
        if verbose and process.returncode == 0:
            print(output.decode(errors="replace").strip())
        return process.returncode


def address_of(model: Model, bucket: str | None, prefix: str | None) -> str | None:
    """The folder of a model's checkpoints in a bucket, which may be any address of fsspec; None without a bucket."""
    bucket = bucket or os.environ.get("BACKUP_BUCKET")
    if not bucket:
        return None
    root = bucket if "://" in bucket else f"s3://{bucket}"
    parts = (prefix or "").strip("/"), model.project, "models", model._storage_name, "checkpoints"
    return "/".join((root.rstrip("/"), *filter(None, parts)))


def name_of(model: Model) -> str:
    return f"{model.project}/{model._storage_name}"
