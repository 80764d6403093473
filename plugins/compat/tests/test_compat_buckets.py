"""Every keyword of ART's methods for buckets and forks, through a real server and `art copy`."""

# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# A type checker does not know what annexes add to the client's classes.

from pathlib import Path

import pytest

import art
from plugins.compat.tests.test_buckets import program
from tests.quick.checkpoints.test_transfer import model as folder_of
from tests.quick.checkpoints.test_transfer import path, same_weights, serving

pytestmark = pytest.mark.anyio
__all__ = ["path"]  # the fixture


async def test_every_keyword_of_buckets_and_forks(
    path: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    bucket, model, fork = f"file://{tmp_path}/bucket", program(), program("b")
    with serving(path) as (url, _):
        async with art.Backend(base_url=url) as backend:
            await backend._experimental_push_to_s3(
                model=model, s3_bucket=bucket, prefix="runs", verbose=True, delete=True
            )
            folder = await backend._experimental_pull_model_checkpoint(
                model=model, step=2, local_path=str(tmp_path / "local"), verbose=True
            )
    assert "_experimental_push_to_s3: delete has no effect" in caplog.text
    kept = folder_of(path, "a", "p").checkpoint_dir(2)
    assert same_weights(Path(folder), kept) and capfd.readouterr().out.strip()
    with serving(tmp_path / "other") as (url, _):
        async with art.Backend(base_url=url) as backend:
            await backend._experimental_fork_checkpoint(
                model=fork,
                from_model="a",
                from_project="p",
                from_s3_bucket=bucket,
                not_after_step=9,
                verbose=True,
                prefix="runs",
            )
            await fork.register(backend)
            assert await fork.get_step() == 2
    with serving(tmp_path / "third") as (url, _):
        async with art.Backend(base_url=url) as backend:
            await backend._experimental_pull_from_s3(
                model=model,
                s3_bucket=bucket,
                prefix="runs",
                verbose=True,
                delete=True,
                only_step="latest",
                step=2,
                exclude=["logs"],
                latest_only=True,
            )
            await model.register(backend=backend)
            assert await model.get_step() == 2
            copied = await backend._experimental_pull_model_checkpoint(
                model=model,
                step="latest",
                local_path=str(tmp_path / "again"),
                s3_bucket=bucket,
                prefix="runs",
                verbose=False,
            )
    assert same_weights(Path(copied), kept)
    assert "_experimental_pull_from_s3: delete and exclude have no effect" in caplog.text
