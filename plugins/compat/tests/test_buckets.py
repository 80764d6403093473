"""ART's `_experimental_...` methods: checkpoints in a bucket, and forks, through a real server and `art copy`."""

import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import art
from art_compat.buckets import address_of
from tests.quick.models.transfers import model as folder_of
from tests.quick.models.transfers import run, same_weights, serving

pytestmark = pytest.mark.anyio


def program(name: str = "a", project: str = "p") -> art.TrainableModel:
    return art.TrainableModel(name=name, project=project, base_model="art/tiny")


async def test_the_first_run_finds_nothing_in_its_bucket(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(path) as (url, _):
        async with art.Backend(url) as backend:
            with caplog.at_level(logging.WARNING):
                await backend._experimental_pull_from_s3(program())
                await backend._experimental_push_to_s3(program())
            assert caplog.text.count("no bucket is named") == 2
            monkeypatch.setenv("BACKUP_BUCKET", f"file://{tmp_path}/empty")
            await backend._experimental_pull_from_s3(program("new"))
            assert not (path / "p" / "models" / "new").exists()
            with pytest.raises(art.ArtError, match="p/nobody"):
                await backend._experimental_push_to_s3(program("nobody"))


async def test_a_copy_that_failed_is_an_error(path: Path) -> None:
    """It is not the same as a bucket without checkpoints: the program would train from step 0, without a backup."""
    with serving(path) as (url, _):
        async with art.Backend(url) as backend:
            with pytest.raises(art.ArtError, match="nosuch"):
                await backend._experimental_pull_from_s3(program("new"), s3_bucket="nosuch://bucket")


async def test_a_step_is_written_to_a_folder_and_forked(path: Path, tmp_path: Path) -> None:
    with serving(path) as (url, _):
        async with art.Backend(url) as backend:
            folder = await backend._experimental_pull_model_checkpoint(
                program(), step=1, local_path=str(tmp_path / "local")
            )
            assert folder == str(tmp_path / "local")
            kept = folder_of(path, "a", "p").checkpoint_dir(1)
            assert same_weights(Path(folder), kept)
            fork = program("b", "q")
            await backend._experimental_fork_checkpoint(fork, from_model="a", from_project="p", not_after_step=1)
            await fork.register(backend)
            assert await fork.get_step() == 1
            with pytest.raises(art.ArtError, match="-1"):
                await backend._experimental_fork_checkpoint(program("c", "p"), from_model="a", not_after_step=-1)


async def test_a_fork_from_a_bucket_takes_the_newest_step_not_after_another(path: Path, tmp_path: Path) -> None:
    bucket = f"file://{tmp_path}/bucket"
    for step in (0, 1, 2):
        run("copy", f"p/a@{step}", f"{address_of(program(), bucket, None)}/{step}", "--path", path)
    with serving(tmp_path / "other") as (url, _):
        async with art.Backend(url) as backend:
            fork = program("b")
            await backend._experimental_fork_checkpoint(fork, from_model="a", from_s3_bucket=bucket, not_after_step=1)
            await fork.register(backend)
            assert await fork.get_step() == 1
    assert folder_of(tmp_path / "other", "a", "p").steps() == [1]


async def test_a_fork_of_a_step_that_the_server_has_needs_no_bucket(path: Path) -> None:
    with serving(path) as (url, _):
        async with art.Backend(url) as backend:
            fork = program("b")
            await backend._experimental_fork_checkpoint(
                fork, from_model="a", from_s3_bucket="nosuch://bucket", not_after_step=1
            )
            await fork.register(backend)
            assert await fork.get_step() == 1


def test_the_layout_is_art_s(monkeypatch: pytest.MonkeyPatch) -> None:
    model = program("agent", "proj")
    assert address_of(model, None, None) is None
    assert address_of(model, "b", None) == "s3://b/proj/models/agent/checkpoints"
    assert address_of(model, "gs://b/", "x/y") == "gs://b/x/y/proj/models/agent/checkpoints"
    monkeypatch.setenv("BACKUP_BUCKET", "c")
    assert address_of(model, None, "") == "s3://c/proj/models/agent/checkpoints"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket on a server with S3's protocol."""
    server_module = pytest.importorskip("moto.server", reason="moto is not installed")
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = server_module.ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    httpx.put(f"http://{host}:{port}/backup").raise_for_status()
    yield "backup"
    server.stop()


async def test_a_model_goes_through_s3(path: Path, tmp_path: Path, s3: str) -> None:
    model = program()
    with serving(path) as (url, _):
        async with art.Backend(url) as backend:
            await backend._experimental_push_to_s3(model, s3_bucket=s3)
    with serving(tmp_path / "other") as (url, _):
        async with art.Backend(url) as backend:
            await backend._experimental_pull_from_s3(model, s3_bucket=s3)
            await model.register(backend)
            assert await model.get_step() == 2


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
    there = tmp_path / "bucket" / "runs" / "p" / "models" / "a" / "checkpoints"
    assert [folder.name for folder in there.iterdir()] == ["0002"]
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
