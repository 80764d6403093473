"""Keys: names, expiry, and what strangers see; how many choices one request may ask for."""

import asyncio
import errno
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

import art
from art_protocol.wire import Health
from art_server.api.openai.routes import check_choices, num_choices
from art_server.engine.engine import NotDelivered
from art_server.errors import BadRequest
from art_server.settings import ApiKey
from art_server.store.model_folder import ADAPTER_FILE
from tests.asgi_client import client
from tests.quick.api.idle_server import MODEL, make
from tests.quick.server.served import sample_group, serving
from tests.refusals import refused
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

PAST, FUTURE = (datetime.now(UTC) + timedelta(days=days) for days in (-1, 1))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_an_expired_key_gets_the_reason(tmp_path: Path) -> None:
    keys = (ApiKey(key="old", expires=PAST), ApiKey(key="new", expires=FUTURE))
    app, _ = make(tmp_path, api_keys=keys)
    async with client(app) as http:
        for path in ("/api/models", "/v1/models"):
            refused = await http.get(path, headers=bearer("old"))
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "expired_key"
            assert f"expired at {PAST:%Y-%m-%dT%H:%M}" in refused.text
            assert (await http.get(path, headers=bearer("new"))).status_code == 200


async def test_a_server_without_a_host_s_key_says_that_it_takes_no_hosts(tmp_path: Path) -> None:
    """Also to the key of a host of another server, which it does not know."""
    for keys in ((), (ApiKey(key="user", scopes=frozenset({"train"})),)):
        app, _ = make(tmp_path / str(len(keys)), api_keys=keys)
        async with client(app) as http:
            refused = await http.get("/api/hosts/join", headers=bearer("joins"))
            assert refused.status_code == 404 and "takes no hosts" in refused.text


def test_a_name_outlives_its_key_and_a_hash_reveals_none() -> None:
    assert ApiKey(key="one", name="alice").owner == ApiKey(key="two", name="alice").owner == "alice"
    nameless = ApiKey(key="secret").owner
    assert nameless == ApiKey(key="secret").owner != ApiKey(key="other").owner
    assert len(nameless) == 16 and "secret" not in nameless


async def test_a_model_s_key_lives_while_its_owner_has_a_key(tmp_path: Path) -> None:
    """The server is started again with other keys and the same secret."""

    def started(key: ApiKey) -> FastAPI:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        (folder / ".server").mkdir(parents=True)
        (folder / ".server" / "model_keys_secret").write_bytes(b"x" * 32)
        return make(folder, api_keys=(key,))[0]

    async with client(started(ApiKey(key="one", name="alice"))) as http:
        body, path = {"model": MODEL, "config": None}, "/_prepare_backend_for_training"
        issued = (await http.post(path, json=body, headers=bearer("one"))).json()[1]
    for accepted, status in (
        (ApiKey(key="two", name="alice"), 200),
        (ApiKey(key="two", name="alice", expires=PAST), 401),
        (ApiKey(key="one", name="bob"), 401),
        (ApiKey(key="two", name="alice", projects=frozenset({"q"})), 200),
    ):
        async with client(started(accepted)) as http:
            answer = await http.get("/v1/models", headers=bearer(issued))
        assert answer.status_code == status
    assert answer.json()["data"] == [], "its project is another key's now"


# --- health ---


async def health(app: FastAPI, path: str, host: str, key: str | None) -> dict[str, Any]:
    async with client(app, host) as http:
        answer = await http.get(path, headers=bearer(key) if key else {})
    return answer.json()


async def test_strangers_see_the_state_only(tmp_path: Path) -> None:
    infer = frozenset({"infer"})
    keys = (ApiKey(key="k", scopes=infer), ApiKey(key="old", expires=PAST))  # type: ignore[arg-type]
    app, server = make(tmp_path / "keys", api_keys=keys)
    (engine,) = server.fleet.replicas
    engine.state, engine.detail = "failed", "last log lines: a prompt"
    bare = Health(engine="failed").model_dump()
    for path in ("/health", "/ready"):
        for key in (None, "wrong", "old"):
            assert await health(app, path, "box", key) == bare
        for key in ("k", "k::session"):
            seen = await health(app, path, "box", key)
            assert seen["detail"] == "last log lines: a prompt" and seen["base_model"] == "art/tiny"
    assert seen["waits_for"] is None
    keys = (ApiKey(key="k"), ApiKey(key="q", projects=frozenset({"q"})))
    app, server = make(tmp_path / "projects", api_keys=keys)
    server.gate.close("p/a")
    for key, reason in (("k", "a step of 'p/a', which trains"), ("q", "a step, which trains")):
        assert (await health(app, "/health", "box", key))["waits_for"] == reason
    app, server = make(tmp_path / "keyless")
    (engine,) = server.fleet.replicas
    engine.state, engine.detail = "failed", "last log lines: a prompt"
    assert (await health(app, "/health", "localhost", None))["detail"] is not None
    assert await health(app, "/health", "evil.example", None) == bare


async def test_a_key_for_one_project_sees_no_name_of_another_s_model_whose_files_cannot_be_delivered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = (ApiKey(key="k"), ApiKey(key="q", projects=frozenset({"q"})))
    app, server = make(tmp_path, api_keys=keys)
    (engine,) = server.fleet.replicas
    folder = server.registry.get("p", "run").folder.checkpoint_dir(0)

    async def deliver(folder: Path, names: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(engine.location, "deliver", deliver)
    (folder / ADAPTER_FILE).touch()
    with pytest.raises(NotDelivered):
        await engine.try_load("p/run@0", folder)
    again = asyncio.create_task(engine.try_load("p/run@0", folder))
    await asyncio.sleep(0)
    what = "which cannot be delivered (Permission denied); they are sent again every 10 s"
    for key, whose in (("k", "'p/run@0'"), ("q", "a model")):
        assert (await health(app, "/health", "box", key))["waits_for"] == f"the files of {whose}, {what}"
    again.cancel()


async def test_more_choices_than_an_engine_samples_are_refused(tmp_path: Path) -> None:
    app, _ = make(tmp_path, api_keys=(ApiKey(key="k"),))
    async with client(app, headers=bearer("k")) as http:
        many = {"model": "none", "prompt": ["a"] * 1000, "n": 2}
        error = (await http.post("/v1/completions", json=many)).json()["error"]
    assert (error["code"], error["param"]) == ("too_many_choices", "n")


@pytest.mark.parametrize("n", ["8", "+3", "1_000", "16.0"])
def test_a_text_is_no_number_of_choices(n: str) -> None:
    """vLLM would read each as a number above the limit."""
    with refused(BadRequest, "invalid_body", "n"):
        check_choices("chat", {"n": n})


@pytest.mark.parametrize(
    ("api", "body", "num"),
    [
        ("chat", {}, 1),
        ("chat", {"n": 4, "prompt": ["a", "b"]}, 4),
        ("completions", {"prompt": [1, 2, 3], "n": 2}, 2),
        ("completions", {"prompt": [[1], [2]], "n": 2.0}, 4),
        ("completions", {"prompt": "text", "n": None}, 1),
        ("completions", {"prompt": [], "n": -3}, 1),
        ("chat", {"n": float("inf")}, 1),
        ("responses", {"n": 9}, 1),
    ],
)
def test_choices_are_prompts_times_n(api: str, body: dict[str, Any], num: int) -> None:
    assert num_choices(api, body) == num


async def test_a_job_is_moved_before_jobs_of_its_own_project_by_keys_for_it(tmp_path: Path) -> None:
    keys = (ApiKey(key="all"), ApiKey(key="one", projects=frozenset({"q"})))
    goes_on = asyncio.Event()

    async def wait(_: object) -> None:
        await goes_on.wait()

    patience = asyncio.timeout(PATIENCE_SECONDS)
    async with patience, serving(tmp_path, api_keys=keys) as served, art.Backend(served.url, "all") as backend:
        served.trainer.events = [wait]
        sampled: list[tuple[art.TrainableModel, art.TrajectoryGroup]] = []
        for number, project in enumerate(("p", "p", "q", "q")):
            model = art.TrainableModel(name=f"a{number}", project=project, base_model="art/tiny")
            await model.register(backend)
            sampled.append((model, await sample_group(model)))
        training: list[asyncio.Task[Any]] = []
        async with httpx.AsyncClient(base_url=served.url, headers=bearer("all")) as http:

            async def queued() -> dict[str, str]:
                """Ids by model, in the order of the queue."""
                jobs = (await http.get("/api/jobs", params={"state": "queued"})).json()["jobs"]
                return {job["name"]: job["job_id"] for job in jobs}

            for model, group in sampled:
                training.append(asyncio.create_task(model.train([group])))
                while len((await http.get("/api/jobs")).json()["jobs"]) < len(training):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            ids = await queued()
            assert list(ids) == ["a2", "a1", "a3"], "projects in turn"
            for moved, before, key, status in (
                ("a1", "a2", "one", 403),
                ("a3", "a1", "one", 403),
                ("a3", "a1", "all", 409),
            ):
                path, body = f"/api/jobs/{ids[moved]}/move", {"before": ids[before]}
                refused = await http.post(path, json=body, headers=bearer(key))
                assert refused.status_code == status, refused.text
                assert list(await queued()) == list(ids)
            path, body = f"/api/jobs/{ids['a3']}/move", {"before": ids["a2"]}
            assert (await http.post(path, json=body, headers=bearer("one"))).status_code == 200
            assert list(await queued()) == ["a3", "a1", "a2"]
        goes_on.set()
        await asyncio.gather(*training)
