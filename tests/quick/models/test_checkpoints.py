"""Checkpoints over the server's routes: listed, pruned, forked, rolled back, deleted, and what each is refused for."""

import asyncio
import contextlib
import json
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from art_server.errors import NotFound
from art_server.ledger.records import Request
from art_server.models.checkpoints import IN_USE_SECONDS
from art_server.settings import ApiKey
from art_server.shared.engine_messages import FinishedChoice
from art_server.store.model_folder import ADAPTER_FILE, OPTIMIZER_FILE, ModelFolder
from art_server.store.registry import Registry
from art_server.store.server_database import FILE
from art_watch.runs import Runs
from art_watch.terminal.cli import main as art
from tests.fakes.clock import FakeClock
from tests.makers.demo import rows_by_step
from tests.quick.models.house import House, add_model, commit, house
from tests.quick.server.served import serving
from tests.refusals import refused
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.anyio

MODEL = "/api/models/p/a"


async def post(here: House, path: str, body: dict[str, Any]) -> Any:
    async with here.client() as http:
        return await http.post(f"{MODEL}/{path}", json=body)


async def test_steps_are_listed_with_their_metrics(tmp_path: Path, tiny_adapter: Path) -> None:
    folder = add_model(tmp_path, tiny_adapter, steps=3)
    commit(folder, tiny_adapter, 3, unchanged=True, created_at=12.5, optimizer_steps=7)
    async with house(tmp_path) as here, here.client() as http:
        reply = (await http.get(f"{MODEL}/checkpoints")).json()
        assert reply["best_metric"] == "train/reward"
        first, _, two, three = reply["checkpoints"]
        assert [first["step"], first["metrics"]] == [0, {}]
        assert two["metrics"] == {"train/reward": 0.2, "sampled_step": 2.0}
        assert [two["is_best"], two["is_serving"]] == [True, False]
        assert [three["is_best"], three["is_serving"]] == [False, True]
        assert [three["unchanged"], three["created_at"], three["optimizer_steps"]] == [True, 12.5, 7]
        size = (tiny_adapter / ADAPTER_FILE).stat().st_size
        assert first["size_bytes"] > size and three["size_bytes"] > first["size_bytes"]
        (folder.checkpoint_dir(2) / "replay").mkdir()
        (folder.checkpoint_dir(2) / "replay" / "batch").write_bytes(bytes(10**6))
        for sizes in (
            (await http.get(f"{MODEL}/checkpoints")).json()["checkpoints"],
            Runs(tmp_path).checkpoints(folder),
        ):
            assert sizes[2]["size_bytes"] > 10**6 > sizes[1]["size_bytes"]
        here.registry.get("p", "a").history.add(1, {"val/reward": 0.5})
        reply = (await http.get(f"{MODEL}/checkpoints")).json()
        assert reply["best_metric"] == "val/reward"
        assert [checkpoint["step"] for checkpoint in reply["checkpoints"] if checkpoint["is_best"]] == [1]


# --- pruning ------------------------------------------------------------------------------------------------------


async def test_deleting_keeps_the_newest_and_the_best_and_tells_both(tmp_path: Path, tiny_adapter: Path) -> None:
    folder = add_model(tmp_path, tiny_adapter, steps=5)
    async with house(tmp_path) as here:
        here.registry.get("p", "a").history.add(1, {"val/reward": 1.0})
        here.engine.load("p/a@4", "p/a@2")
        reply = await post(here, "checkpoints/delete", {"best_metric": "val/reward"})
        assert reply.json() == {"kept": [1, 4], "deleted": [0, 2, 3]}
        assert here.engine.asked == ["unload p/a@2"]
        assert folder.steps() == [1, 4]
        reply = await post(here, "checkpoints/delete", {"keep": []})
        assert reply.json() == {"kept": [4], "deleted": [1]}


async def test_a_metric_that_was_never_logged_deletes_nothing(tmp_path: Path, tiny_adapter: Path) -> None:
    folder = add_model(tmp_path, tiny_adapter, steps=3)
    async with house(tmp_path) as here:
        reply = await post(here, "checkpoints/delete", {"best_metric": "val/acuracy"})
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (422, "unknown_metric", "best_metric")
        assert folder.steps() == [0, 1, 2]
        assert (await post(here, "checkpoints/delete", {})).json()["kept"] == [2]


async def test_art_s_clients_send_their_default_metric_for_every_model(tmp_path: Path, tiny_adapter: Path) -> None:
    folder = add_model(tmp_path, tiny_adapter, steps=4)
    body = {"name": "a", "project": "p", "_internal_config": {}}
    async with house(tmp_path) as here, here.client() as http:
        reply = await http.post("/_delete_checkpoints?benchmark=val/other", json=body)
        assert (reply.status_code, folder.steps()) == (422, [0, 1, 2, 3])
        here.registry.get("p", "a").history.add(2, {"train/reward": 9.0})
        reply = await http.post("/_delete_checkpoints?benchmark=val/reward", json=body)
        assert (reply.status_code, folder.steps()) == (200, [2, 3])


async def test_before_the_first_step_there_is_nothing_to_delete(tmp_path: Path, tiny_adapter: Path) -> None:
    add_model(tmp_path, tiny_adapter)
    async with house(tmp_path) as here:
        for body in ({}, {"best_metric": "val/reward"}):
            reply = await post(here, "checkpoints/delete", body)
            assert reply.json() == {"kept": [0], "deleted": []}


async def test_a_step_that_is_going_is_not_found_before_it_is_gone(tmp_path: Path, tiny_adapter: Path) -> None:
    folder = add_model(tmp_path, tiny_adapter, steps=3)
    async with house(tmp_path) as here:
        here.engine.load("p/a@0")

        def look() -> None:
            assert folder.steps() == [0, 1, 2], "still on disk"
            for text in ("p/a@0", "a@1"):
                with pytest.raises(NotFound) as error:
                    here.registry.resolve(text, "art/tiny", None)
                assert error.value.code == "unknown_step"
            assert here.registry.resolve("p/a", "art/tiny", None).step == 2

        here.engine.when_unloading = look
        reply = await post(here, "checkpoints/delete", {"keep": []})
        assert reply.json()["deleted"] == [0, 1]
        assert here.engine.asked == ["unload p/a@0"]
        assert here.registry.get("p", "a").deleting == set()


async def test_what_a_request_holds_is_not_deleted(tmp_path: Path, tiny_adapter: Path) -> None:
    folder = add_model(tmp_path, tiny_adapter, steps=4)
    async with house(tmp_path, keep_last=1) as here:
        model = here.registry.get("p", "a")
        with here.gate.inside("p/a@1"):
            reply = await post(here, "checkpoints/delete", {"keep": []})
            assert reply.json() == {"kept": [1, 3], "deleted": [0, 2]}
            await here.checkpoints.retain(model)
            assert folder.steps() == [1, 3]
        await here.checkpoints.retain(model)
        assert folder.steps() == [3]


@pytest.mark.parametrize(("keep_last", "kept"), [(0, [0, 1, 2, 3, 4, 5]), (2, [1, 3, 4, 5]), (50, [0, 1, 2, 3, 4, 5])])
async def test_after_a_step_the_newest_the_serving_and_the_best_are_kept(
    keep_last: int, kept: list[int], tmp_path: Path, tiny_adapter: Path
) -> None:
    folder = add_model(tmp_path, tiny_adapter, steps=6)
    async with house(tmp_path, keep_last=keep_last) as here:
        model = here.registry.get("p", "a")
        model.history.add(1, {"val/reward": 0.9})
        model.step = 3  # the alias moves after the new steps are on disk
        await here.checkpoints.retain(model)
        assert folder.steps() == kept


async def test_what_cannot_be_deleted_is_told_and_stops_no_job(
    tmp_path: Path, tiny_adapter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add_model(tmp_path, tiny_adapter, steps=3)
    async with house(tmp_path, keep_last=1) as here:
        model = here.registry.get("p", "a")
        model.folder.remove_steps = lambda steps: 1 / 0  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError):
            await here.checkpoints.retain(model)
        assert model.deleting == set()

        def refuse(steps: Any) -> None:
            raise PermissionError("read-only file system")

        model.folder.remove_steps = refuse  # type: ignore[method-assign]
        await here.checkpoints.retain(model)
        assert "old steps of p/a could not be deleted: read-only file system" in caplog.text


# --- fork ---------------------------------------------------------------------------------------------------------


async def test_a_fork_begins_at_its_source_s_step(tmp_path: Path, tiny_adapter: Path) -> None:
    folder = add_model(tmp_path, tiny_adapter, steps=4)
    async with house(tmp_path) as here:
        reply = (await post(here, "fork", {"name": "b", "project": "q", "step": 2})).json()
        assert (reply["inference_name"], reply["step"]) == ("q/b", 2)
        assert reply["lora"] == (await info(here, "p/a"))["lora"]
        forked = here.registry.resolve("q/b@2", "art/tiny", None).model
        assert forked is not None and forked.folder.steps() == [2]
        files = forked.folder.read_checkpoint(2)
        assert files.job_id is None and files.files == folder.read_checkpoint(2).files
        assert files.optimizer_steps == 6, "the learning rate's schedule continues"
        assert "q/b begins with 6 optimizer steps" in reply["notes"][0] and "schedule_begins=6" in reply["notes"][0]
        assert (forked.folder.checkpoint_dir(2) / OPTIMIZER_FILE).exists()
        assert forked.history.span()[0] == 0
        reply = (await post(here, "fork", {"name": "c", "project": "p"})).json()
        assert reply["step"] == 3 and "not kept" not in reply["notes"][0]
        (folder.checkpoint_dir(1) / OPTIMIZER_FILE).unlink(missing_ok=True)
        (note,) = (await post(here, "fork", {"name": "d", "project": "p", "step": 1})).json()["notes"]
        assert note.endswith(
            "The optimizer state of step 1 is not kept, so the learning rate rises over the first optimizer steps"
        )
        assert "notes" not in (await post(here, "fork", {"name": "e", "project": "p", "step": 0})).json()
        assert not list((tmp_path / ".server" / "incoming").iterdir())
    again = Registry(tmp_path)
    assert {model.id: model.step for model in again.all()} == {"p/a": 3, "p/c": 3, "p/d": 1, "p/e": 0, "q/b": 2}


async def info(here: House, model_id: str) -> dict[str, Any]:
    async with here.client() as http:
        return (await http.get(f"/api/models/{model_id}")).json()


async def test_a_fork_that_cannot_be_made_makes_nothing(tmp_path: Path, tiny_adapter: Path) -> None:
    folder = add_model(tmp_path, tiny_adapter, steps=2)
    (tmp_path / "p" / "models" / "leftover").mkdir()
    refused = {"name": "b", "project": "p"}
    async with house(tmp_path) as here:
        for body, status, code in (
            (refused | {"name": "a"}, 409, "model_exists"),
            (refused | {"step": 9}, 404, "unknown_step"),
            (refused | {"name": "../b"}, 422, "bad_name"),
            (refused | {"name": "leftover"}, 409, "model_exists"),
            (refused | {"name": "A"}, 409, "name_differs_by_case"),
            (refused | {"project": "P"}, 409, "name_differs_by_case"),
        ):
            reply = await post(here, "fork", body)
            assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
        (folder.checkpoint_dir(1) / ADAPTER_FILE).write_bytes(b"rot")
        reply = await post(here, "fork", refused)
        assert (reply.status_code, reply.json()["error"]["code"]) == (422, "broken_checkpoint")
        assert [model.id for model in here.registry.all()] == ["p/a"]
        names = {entry.name for entry in (tmp_path / "p" / "models").iterdir()}
        assert names == {"a", "leftover"}


@contextlib.contextmanager
def locked_database(root: Path) -> Iterator[None]:
    """Inside the block another program locks the server's database."""
    with contextlib.closing(sqlite3.connect(root / ".server" / FILE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


async def test_a_fork_that_a_locked_database_refused_can_be_repeated(tmp_path: Path, tiny_adapter: Path) -> None:
    add_model(tmp_path, tiny_adapter)
    async with house(tmp_path) as here:
        body = {"name": "b", "project": "p"}
        with locked_database(tmp_path):
            reply = await post(here, "fork", body)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "database_locked")
        assert (await post(here, "fork", body)).status_code == 200


async def test_a_key_forks_between_its_own_projects_only(tmp_path: Path, tiny_adapter: Path) -> None:
    add_model(tmp_path, tiny_adapter)
    keys = (
        ApiKey(key="k", projects=frozenset({"p"})),
        ApiKey(key="i", scopes=frozenset({"infer"})),
    )
    async with house(tmp_path, api_keys=keys) as here:
        async with here.client(headers={"x-api-key": "k"}) as http:
            body = {"name": "b", "project": "q"}
            assert (await http.post(f"{MODEL}/fork", json=body)).status_code == 403
            put = await http.put("/api/models/q/a/checkpoints/0.tar", content=b"x")
            assert put.status_code == 403
        async with here.client(headers={"x-api-key": "i"}) as http:
            assert (await http.delete(MODEL)).status_code == 403
            assert (await http.get(f"{MODEL}/checkpoints/0.tar")).status_code == 403


# --- rollback -----------------------------------------------------------------------------------------------------


async def test_a_rollback_sets_later_steps_and_their_rows_aside(tmp_path: Path, tiny_adapter: Path) -> None:
    folder = add_model(tmp_path, tiny_adapter, steps=5)
    for step in (2, 3, 4):
        folder.write_lines("train", step, b"rollouts\n")
    folder.write_lines("val", 4, b"validation\n")
    folder.tokens_file(4).parent.mkdir()
    folder.tokens_file(4).write_bytes(b"tokens")
    async with house(tmp_path) as here:
        here.engine.load("p/a@4", "p/a@3", "p/a@1", "p/b@4")
        reply = await post(here, "rollback", {"step": 2})
        assert (reply.status_code, reply.json()["step"]) == (200, 2)
        assert folder.steps() == [0, 1, 2]
        assert here.registry.get("p", "a").history.columns(())["steps"] == [1, 2]
        assert sorted(rows_by_step(folder.history_file)) == [1, 2]
        assert here.registry.resolve("a", "art/tiny", None).step == 2
        # Steps 3 and 4 will come again with other weights: no adapter and no cached prompt of theirs may answer then.
        assert set(here.engine.adapters) == {"p/a@1", "p/b@4"}
        assert here.engine.asked[-1] == "forget"
        assert here.registry.get("p", "a").deleting == set()
        aside = sorted(entry.name[:17] for entry in folder.checkpoints_dir.glob(".rolled-back-*"))
        assert aside == [".rolled-back-0003", ".rolled-back-0004"]
        kept_rows = (folder.path / "history.rolled-back.jsonl").read_text().splitlines()
        assert len(kept_rows) == 2 and '"step": 3' in kept_rows[0]
        assert Runs(tmp_path).splits(folder) == {"train": [2], "val": []}
        rollouts = (folder.path / "trajectories.rolled-back").rglob("*.jsonl.gz")
        names = sorted(f"{file.parent.name}/{file.name[:4]}" for file in rollouts)
        assert names == ["train/0003", "train/0004", "val/0004"]
        assert not folder.tokens_file(4).exists()
        assert len(list((folder.path / "tokens.rolled-back").iterdir())) == 1
        assert (await post(here, "rollback", {"step": 2})).json()["step"] == 2
        assert (await post(here, "rollback", {"step": 4})).status_code == 404
    assert Registry(tmp_path).get("p", "a").step == 2


async def test_the_command_rolls_a_model_back(
    tmp_path: Path, tiny_adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_model(tmp_path, tiny_adapter, steps=5)

    def run(*arguments: str) -> tuple[int, str]:
        code: Any = 0
        try:
            art([*arguments, "--url", served.url])
        except SystemExit as end:
            code = end.code
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    async with serving(tmp_path) as served:
        for step, code, words in (
            ("9", 2, "has no step 9"),
            ("x", 2, "'x' is no step"),
            ("2", 0, "step 2 is the newest"),
        ):
            ended, text = await asyncio.to_thread(run, "rollback", "a", step)
            assert ended == code and words in text, text
        _, listed = await asyncio.to_thread(run, "checkpoints", "a", "--json")
        assert [row["step"] for row in json.loads(listed)["checkpoints"]] == [0, 1, 2]
        assert (await asyncio.to_thread(run, "rollback", "a", "best"))[0] == 0
        assert served.server.registry.get("p", "a").step == 2


def sampled_by(here: House, step: int) -> str:
    """A recorded choice of p/a at a step; returns its id."""
    request = Request(f"{step:032x}", "chat", here.registry.get("p", "a").number, step, "p")
    ledger = here.server.ledger
    with ledger.open_request(request) as opened:
        ledger.take_prompt(request.request_id, 0, [1, 2])
        sample = FinishedChoice("x", 0, "yes", [7], [-0.5], "stop", None, {"n": 1})
        ledger.take_samples([(request.request_id, 0, 0, sample)])
        return opened.records[0].choice_id


async def test_samples_of_steps_that_are_gone_do_not_count_for_new_ones_of_the_number(
    tmp_path: Path, tiny_adapter: Path
) -> None:
    add_model(tmp_path, tiny_adapter, steps=5)
    async with house(tmp_path) as here:
        find = here.server.ledger.find
        kept, gone = sampled_by(here, 2), sampled_by(here, 4)

        def steps() -> list[int | None]:
            return [record.request.step for choice in (kept, gone) if (record := find(choice))]

        assert (await post(here, "rollback", {"step": 2})).status_code == 200
        assert steps() == [2, None]
        async with here.client() as client:
            assert (await client.delete("/api/models/p/a")).status_code < 300
        folder = add_model(tmp_path, tiny_adapter, steps=5)
        new = here.registry.add(folder, folder.read())
        assert here.server.ledger.find_by_logprobs(new.number, [-0.5]) == []


async def test_jobs_refuse_rollback_and_deletion(tmp_path: Path, tiny_adapter: Path) -> None:
    folder = add_model(tmp_path, tiny_adapter, steps=3)
    add_model(tmp_path, tiny_adapter, name="b")
    async with house(tmp_path) as here:
        job = here.add_job()
        for _ in ("queued", "running"):
            reply = await post(here, "rollback", {"step": 1})
            assert (reply.status_code, reply.json()["error"]["code"]) == (409, "jobs_pending")
            async with here.client() as http:
                assert (await http.delete(MODEL)).status_code == 409
            assert (folder.steps(), here.registry.get("p", "a").step) == ([0, 1, 2], 2)
            here.queue.set_running(job, 3)
        here.add_job("b")
        here.queue.set_done(job, {}, here.queue.get(job).report)
        assert (await post(here, "rollback", {"step": 1})).status_code == 200


async def test_a_deletion_leaves_jobs_alone(tmp_path: Path, tiny_adapter: Path) -> None:
    """While it runs jobs find the model, and requests for inference do not."""
    folder = add_model(tmp_path, tiny_adapter, steps=2)
    async with house(tmp_path) as here, here.client() as http:
        here.engine.load("p/a@1")
        job = here.add_job()
        assert (await http.delete(MODEL)).json()["error"]["code"] == "jobs_pending"
        here.queue.set_done(job, {}, here.queue.get(job).report)
        jobs: list[str] = []

        def add_job() -> None:
            with pytest.raises(NotFound):
                here.registry.resolve("a", "art/tiny", None)
            jobs.append(here.add_job())
            assert here.registry.get("p", "a").step == 1

        here.engine.when_unloading = add_job
        assert (await http.delete(MODEL)).json()["error"]["code"] == "jobs_pending"
        (job,) = jobs
        assert (folder.steps(), here.registry.resolve("a", "art/tiny", None).step) == ([0, 1], 1)
        here.queue.set_done(job, {}, here.queue.get(job).report)
        assert (await http.delete(MODEL)).status_code < 300
        assert here.registry.find("p", "a") is None and not folder.path.exists()


async def test_a_key_of_a_step_that_is_gone_can_be_used_again(tmp_path: Path, tiny_adapter: Path) -> None:
    folder = add_model(tmp_path, tiny_adapter, steps=3)
    async with house(tmp_path) as here, here.client() as http:
        number = here.registry.get("p", "a").number
        for step in (1, 2):
            job = here.add_job(key=f"batch {step}")
            here.queue.set_running(job, step)
            here.queue.set_done(job, {}, here.queue.get(job).report)

        def keys() -> list[int | None]:
            jobs = [here.queue.find_key(number, f"batch {step}", "digest") for step in (1, 2)]
            return [job.target_step for job in jobs if job is not None]

        assert keys() == [1, 2]
        assert (await post(here, "rollback", {"step": 1})).status_code == 200
        assert keys() == [1]
        assert (await http.delete(MODEL)).status_code < 300
        add_model(tmp_path, tiny_adapter)
        new = here.registry.add(folder, folder.read())
        assert here.queue.find_key(new.number, "batch 1", "digest") is None


async def test_a_rollback_waits_for_requests_and_new_ones_get_the_earlier_step(
    tmp_path: Path, tiny_adapter: Path
) -> None:
    folder = add_model(tmp_path, tiny_adapter, steps=3)
    clock = FakeClock()
    async with house(tmp_path, clock=clock) as here:
        with here.gate.inside("p/a@2"):
            rolling = asyncio.create_task(post(here, "rollback", {"step": 1}))
            await until(lambda: here.registry.resolve("a", "art/tiny", None).step == 1)
            with pytest.raises(NotFound):
                here.registry.resolve("a@2", "art/tiny", None)
            assert folder.steps() == [0, 1, 2]
        assert (await rolling).status_code == 200 and folder.steps() == [0, 1]
        with here.gate.inside("p/a@1"):
            rolling = asyncio.create_task(post(here, "rollback", {"step": 0}))
            await clock.end(IN_USE_SECONDS)
            reply = await rolling
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "in_use")
        assert (folder.steps(), here.registry.get("p", "a").step) == ([0, 1], 1)
        assert here.registry.resolve("a@1", "art/tiny", None).step == 1


async def test_a_job_that_comes_while_a_rollback_waits_goes_first(tmp_path: Path, tiny_adapter: Path) -> None:
    folder = add_model(tmp_path, tiny_adapter, steps=3)
    async with house(tmp_path) as here:
        with here.gate.inside("p/a@2"):
            rolling = asyncio.create_task(post(here, "rollback", {"step": 1}))
            await until(lambda: here.registry.get("p", "a").step == 1)
            here.add_job()
        assert (await rolling).json()["error"]["code"] == "jobs_pending"
        assert (folder.steps(), here.registry.get("p", "a").step) == ([0, 1, 2], 2)


async def test_a_step_that_a_job_made_while_a_rollback_waited_is_not_set_aside(
    tmp_path: Path, tiny_adapter: Path
) -> None:
    folder = add_model(tmp_path, tiny_adapter, steps=3)
    async with house(tmp_path) as here:
        model = here.registry.get("p", "a")
        with here.gate.inside("p/a@2"):
            rolling = asyncio.create_task(post(here, "rollback", {"step": 1}))
            await until(lambda: model.step == 1)
            shutil.copytree(folder.checkpoint_dir(2), folder.checkpoint_dir(3))
            model.step = 3
        assert (await rolling).json()["error"]["code"] == "step_moved"
        assert (folder.steps(), model.step, model.deleting) == ([0, 1, 2, 3], 3, set())


class Killed(BaseException):
    pass


@pytest.mark.parametrize("point", ["roll_back", "set_aside"])
async def test_a_server_that_died_in_a_rollback_is_followed_by_one_that_completes_it(
    point: str, tmp_path: Path, tiny_adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = add_model(tmp_path, tiny_adapter, steps=4)

    def die(*_: object) -> None:
        raise Killed

    async with house(tmp_path) as here:
        with monkeypatch.context() as patched:
            patched.setattr(ModelFolder, point, die)
            with pytest.raises(Killed):
                here.checkpoints._set_aside(here.registry.get("p", "a"), 1, [2, 3])
    assert folder.steps() == [0, 1, 2, 3]
    async with house(tmp_path) as here:
        model = here.registry.get("p", "a")
        assert (model.step, model.history.columns(())["steps"], folder.steps()) == (1, [1], [0, 1])
    assert sorted(rows_by_step(folder.history_file)) == [1]


async def test_a_rollback_whose_folder_cannot_follow_is_completed_before_the_next_use(
    tmp_path: Path, tiny_adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = add_model(tmp_path, tiny_adapter, steps=3)

    def fill(*_: object) -> None:
        raise OSError(28, "No space left on device")

    async with house(tmp_path) as here:
        with monkeypatch.context() as patched:
            patched.setattr(ModelFolder, "roll_back", fill)
            assert (await post(here, "rollback", {"step": 1})).status_code >= 500
            assert folder.steps() == [0, 1, 2]
            model = here.registry.get("p", "a")
            await here.registry.verify(model)
            assert here.registry.resolve("p/a", "art/tiny", None).step == 1, "inference goes on"
            with refused(NotFound, "unknown_step", "model"):
                here.registry.resolve("p/a@2", "art/tiny", None)
        model = await here.registry.get_whole("p", "a")
        assert (model.step, folder.steps()) == (1, [0, 1])


async def test_the_ledger_forgets_steps_while_jobs_are_accepted(
    tmp_path: Path, tiny_adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_model(tmp_path, tiny_adapter, steps=3)
    add_model(tmp_path, tiny_adapter, name="b")
    async with house(tmp_path) as here:
        forget, has_added = here.server.ledger.forget_steps, threading.Event()

        def add_job() -> None:
            here.add_job("b")
            has_added.set()

        def forget_meanwhile(model: int, after: int) -> None:
            threading.Thread(target=add_job).start()
            assert has_added.wait(PATIENCE_SECONDS)
            forget(model, after)

        monkeypatch.setattr(here.server.ledger, "forget_steps", forget_meanwhile)
        assert (await post(here, "rollback", {"step": 1})).status_code == 200


# --- deleting a model ---------------------------------------------------------------------------------------------


async def test_a_renamed_model_has_its_steps_history_jobs_and_records(tmp_path: Path, tiny_adapter: Path) -> None:
    add_model(tmp_path, tiny_adapter, steps=3)
    async with house(tmp_path) as here:
        job = here.add_job(key="k")
        assert (await post(here, "rename", {"name": "b"})).json()["error"]["code"] == "jobs_pending"
        here.queue.set_cancelled(job, is_running=False)
        here.engine.load("p/a@2")
        reply = await post(here, "rename", {"name": "b"})
        assert (reply.status_code, reply.json()["inference_name"]) == (200, "p/b")
        assert here.engine.asked == ["unload p/a@2", "forget"]
        model = here.registry.get("p", "b")
        assert (model.step, model.record.name, model.folder.steps()) == (2, "b", [0, 1, 2])
        assert model.history.means("train/reward") == {2: 0.2, 1: 0.1}
        assert here.queue.get(job).name == "b" and here.queue.has_key(model.number, "k")
        assert (await post(here, "rename", {"name": "c"})).status_code == 404
    again = Registry(tmp_path)
    assert [model.id for model in again.all()] == ["p/b"]
    assert again.get("p", "b").history.means("train/reward") == {2: 0.2, 1: 0.1}
    again.database.close()


async def test_a_name_that_is_taken_or_wrong_renames_nothing(tmp_path: Path, tiny_adapter: Path) -> None:
    add_model(tmp_path, tiny_adapter)
    add_model(tmp_path, tiny_adapter, name="other")
    async with house(tmp_path, api_keys=(ApiKey(key="k", projects=frozenset({"q"})), ApiKey(key="all"))) as here:
        for key, name, status in (
            ("k", "b", 403),
            ("all", "other", 409),
            ("all", "a", 409),
            ("all", "A", 409),
            ("all", "..", 422),
        ):
            async with here.client(headers={"authorization": f"Bearer {key}"}) as http:
                reply = await http.post(f"{MODEL}/rename", json={"name": name})
            assert reply.status_code == status, (name, reply.text)
        assert {model.id for model in here.registry.all()} == {"p/a", "p/other"}


async def test_tags_and_notes_are_replaced_and_stay_with_the_model(tmp_path: Path, tiny_adapter: Path) -> None:
    folder = add_model(tmp_path, tiny_adapter)
    (folder.path / "about.json").write_text("cut sho")
    runs = Runs(tmp_path)
    before = runs.marks()
    async with house(tmp_path) as here, here.client() as http:
        assert runs.summary(folder)["tags"] == [], "what cannot be read is nothing"
        about = {"tags": ["best", "rate 1e-5"], "notes": "<b>first</b>\nsecond", "price_per_hour": 2.5}
        assert (await http.put(f"{MODEL}/about", json=about)).json() == about
        assert runs.summary(folder)["tags"] == about["tags"] and runs.marks() != before
        for bad in (
            {"tags": [""]},
            {"tags": ["x" * 41]},
            {"notes": "x" * 20_001},
            {"price_per_hour": -1},
            {"other": 1},
        ):
            assert (await http.put(f"{MODEL}/about", json=bad)).status_code == 422, bad
        await post(here, "rename", {"name": "b"})
        assert here.registry.get("p", "b").folder.read_about().model_dump() == about
        assert (await http.put(f"{MODEL}/about", json=about)).status_code == 404


async def test_a_deleted_model_is_gone(tmp_path: Path, tiny_adapter: Path) -> None:
    folder = add_model(tmp_path, tiny_adapter, steps=2)
    add_model(tmp_path, tiny_adapter, name="b")
    async with house(tmp_path) as here, here.client() as http:
        here.engine.load("p/a@1", "p/b@0")
        with here.gate.inside("p/a@0"):
            reply = await http.delete(MODEL)
            assert (reply.status_code, reply.json()["error"]["code"]) == (409, "in_use")
            assert here.registry.get("p", "a").step == 1 and folder.exists()
        reply = await http.delete(MODEL)
        assert (reply.status_code, reply.json()["step"]) == (200, 1)
        assert here.engine.loaded_adapters() == ["p/b@0"] and here.engine.asked[-1] == "forget"
        assert (await http.get(MODEL)).status_code == 404
        assert [entry.name for entry in (tmp_path / "p" / "models").iterdir()] == ["b"]


async def test_a_model_is_deleted_with_its_files_also_if_the_database_is_locked(
    tmp_path: Path, tiny_adapter: Path
) -> None:
    add_model(tmp_path, tiny_adapter)
    async with house(tmp_path) as here, here.client() as http:
        with locked_database(tmp_path):
            assert (await http.delete(MODEL)).status_code == 200
        assert (await http.get(MODEL)).status_code == 404
        assert [*(tmp_path / "p" / "models").iterdir()] == []


async def test_of_two_deletions_at_once_one_finds_nothing(tmp_path: Path, tiny_adapter: Path) -> None:
    add_model(tmp_path, tiny_adapter)
    async with house(tmp_path) as here, here.client() as http:
        replies = await asyncio.gather(http.delete(MODEL), http.delete(MODEL))
    assert sorted(reply.status_code for reply in replies) == [200, 404]


async def test_a_model_that_could_not_be_deleted_is_as_before(tmp_path: Path, tiny_adapter: Path) -> None:
    add_model(tmp_path, tiny_adapter)
    async with house(tmp_path) as here, here.client() as http:
        here.add_job()
        assert (await http.delete(MODEL)).json()["error"]["code"] == "jobs_pending"
        assert here.registry.resolve("p/a", "art/tiny", None).step == 0
