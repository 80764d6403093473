"""The page's routes: over a folder, with a running server, and with keys."""

import asyncio
import gzip
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from art_server.app import make_app
from art_server.server import build
from art_server.settings import ApiKey, ServerConfig
from art_watch import routes as look
from art_watch.view import make_view
from tests import asgi_client
from tests.fakes.page_server import make_live
from tests.makers.demo import HOSTILE_METRIC, log, make_demo
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio
RUN = "/api/look/models/demo/webnav-8b"
KEYS = (
    ApiKey(key="all"),
    ApiKey(key="demo-only", projects=frozenset({"demo"})),
    ApiKey(key="other-only", projects=frozenset({"other"})),
    ApiKey(key="infer-only", scopes=frozenset({"infer"})),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo")
    make_demo(path, runs=2, steps=5, rollouts=48)
    (path / "logs").mkdir()
    (path / "logs" / "engine.log").write_text("".join(f"line {number}\n" for number in range(500)))
    return path


def client(app: FastAPI, key: str | None = None) -> httpx.AsyncClient:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return asgi_client.client(app, headers=headers)


async def get(app: FastAPI, path: str, key: str | None = None) -> Any:
    async with client(app, key) as http:
        answer = await http.get(path)
    assert answer.status_code == 200, (path, answer.text)
    return answer.json()


def guarded(root: Path, tmp_path: Path) -> FastAPI:
    """A server with keys, whose own files are elsewhere; it shows the demo's folder."""
    config = ServerConfig(path=tmp_path / "served", api_keys=KEYS)
    app = make_app(build(config), inference_port=None)
    app.state.runs = make_view(root).state.runs
    return app


async def test_the_page_and_all_files_that_it_names_are_served(root: Path) -> None:
    async with client(make_view(root)) as http:
        page = await http.get("/")
        assert page.status_code == 200 and "text/html" in page.headers["content-type"]
        wanted = set(re.findall(r'(?:src|href)="(page/[^"]+)"', page.text))
        assert {"page/app.js", "page/style.css", "page/theme.js"} <= wanted
        seen: set[str] = set()
        while wanted - seen:
            path = min(wanted - seen)
            seen.add(path)
            answer = await http.get(f"/{path}")
            assert answer.status_code == 200, path
            kind = "text/css" if path.endswith("css") else "javascript"
            assert kind in answer.headers["content-type"], path
            wanted |= {f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', answer.text)}
        folder = resources.files("art_watch") / "page"
        names = {f"page/{entry.name}" for entry in folder.iterdir() if entry.is_file()}
        assert seen | {"page/index.html"} == names, "no file lies unused"


async def test_scripts_come_from_this_server_alone(root: Path) -> None:
    async with client(make_view(root)) as http:
        for path in ("/", "/page/app.js", "/page/plotly.min.js"):
            headers = (await http.get(path)).headers
            directives = headers["content-security-policy"].split(";")
            policy = dict(directive.strip().split(" ", 1) for directive in directives)
            assert policy["default-src"] == "'self'" and "script-src" not in policy
            assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
            assert headers["x-content-type-options"] == "nosniff"
        charts = (await http.get("/page/plotly.min.js")).content
        assert b"plotly.js" in charts[:100]
        for path in ("/page/nothing.js", "/page/%2e%2e%2fruns.py", "/page/..%2f..%2fview.py"):
            assert (await http.get(path)).status_code == 404, path


async def test_a_folder_without_a_server_has_no_live_state(root: Path) -> None:
    overview = await get(make_view(root), "/api/look/overview")
    assert overview["live"] is None
    assert [model["id"] for model in overview["models"]] == ["demo/webnav-8b", "demo/webnav-lr2e5"]


async def test_a_running_server_shows_its_health_its_jobs_and_its_memory(root: Path) -> None:
    live = (await get(make_live(root), "/api/look/overview"))["live"]
    assert live["health"]["engine"] == "ready" and live["machine"]["disk_free_bytes"] > 0
    assert [job["state"] for job in live["jobs"]] == ["running", "queued"]
    assert live["activity"]["largest"] == "rollouts"


async def test_the_history_has_the_requested_columns(root: Path) -> None:
    rows = [json.loads(line) for line in (root / "demo/models/webnav-8b/history.jsonl").read_text().splitlines()]
    async with client(make_view(root)) as http:
        wanted = ["train/reward", HOSTILE_METRIC, "missing"]
        answer = await http.get(f"{RUN}/history", params={"metric": wanted})
        history = answer.json()
        many: list[tuple[str, str | int | float | None]] = [("metric", "a")] * (look.MAX_METRICS + 1)
        assert (await http.get(f"{RUN}/history", params=many)).status_code == 422
    assert history["metrics"] == {name: [row.get(name) for row in rows] for name in wanted}
    assert HOSTILE_METRIC in history["names"] and "missing" not in history["names"]


async def test_rollouts_trees_and_checkpoints_are_served(root: Path) -> None:
    app = make_view(root)
    assert (await get(app, f"{RUN}/rollouts"))["splits"]["train"] == [1, 2, 3, 4, 5]
    groups = (await get(app, f"{RUN}/rollouts/train/1"))["groups"]
    assert len(groups) == 6
    some = (await get(app, f"{RUN}/rollouts/train/1?text=WASHIT"))["groups"]
    assert [group["index"] for group in some] == [4]
    rollout = await get(app, f"{RUN}/rollouts/train/1/4/2")
    assert rollout["has_token_record"] and rollout["num_rollouts"] == 8
    tree = await get(app, f"{RUN}/trees/1/0")
    assert 0 < tree["num_tree_tokens"] < tree["num_sequence_tokens"]
    checkpoints = (await get(app, f"{RUN}/checkpoints"))["checkpoints"]
    assert [checkpoint["step"] for checkpoint in checkpoints] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/look/models/demo/nothing/history", 404),
        ("/api/look/models/..%2Fdemo/webnav-8b/history", 404),
        ("/api/look/models/demo/.hidden/history", 422),
        (f"{RUN}/rollouts/..%5C/1", 422),
        (f"{RUN}/rollouts/.secret/1", 422),
        (f"{RUN}/rollouts/train/99", 404),
        (f"{RUN}/rollouts/train/-1", 422),
        (f"{RUN}/rollouts/train/{'9' * 300}", 422),
        (f"{RUN}/rollouts/train/x/0/0", 422),
        (f"{RUN}/rollouts/train/1/99/0", 404),
        (f"{RUN}/rollouts/train/1/0/99", 404),
        (f"{RUN}/trees/99/0", 404),
        (f"{RUN}/trees/1/{10**12}", 422),
        ("/api/look/logs/passwd", 422),
        ("/api/look/logs/engine-..%2F1", 404),
        ("/api/look/logs/engine-1%0A", 422),
        ("/api/look/logs/engine?lines=0", 422),
    ],
)
async def test_bad_addresses_get_an_error_that_says_why(root: Path, path: str, status: int) -> None:
    async with client(make_view(root)) as http:
        answer = await http.get(path)
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body["error"]["message"] if "error" in body else body["detail"][0]["msg"]


async def test_broken_numbers_and_halves_of_characters_are_sent_as_json(tmp_path: Path) -> None:
    (folder,) = make_demo(tmp_path, runs=1, steps=1, rollouts=8)
    with (folder.path / "history.jsonl").open("a") as history:
        history.write('{"step": 2, "train/reward": NaN, "x\\ud800": 1}\n{"step": 3, "tra')
    line = {"trajectories": [{"messages": [{"role": "user", "content": "a\ud800b"}], "reward": 1}]}
    content = json.dumps(line | {"metrics": {"a": float("inf")}}) + "\n{cut"
    folder.trajectories_file("train", 1).write_bytes(gzip.compress(content.encode()))
    app = make_view(tmp_path)
    history = await get(app, f"{RUN}/history?metric=train/reward")
    assert history["steps"] == [1, 2] and history["metrics"]["train/reward"][1] is None
    assert "x?" in history["names"]
    groups = (await get(app, f"{RUN}/rollouts/train/1"))["groups"]
    assert groups[0]["rollouts"][0]["text"] == "" and groups[0]["metrics"] == {"a": None}
    assert groups[1]["is_unreadable"]
    rollout = await get(app, f"{RUN}/rollouts/train/1/0/0")
    assert rollout["histories"][0]["entries"][0]["text"] == "a?b"


async def test_logs_end_with_their_last_lines(root: Path) -> None:
    app = make_view(root)
    text = (await get(app, "/api/look/logs/engine?lines=3"))["text"]
    assert text.split() == ["line", "497", "line", "498", "line", "499"]
    for other in ("trainer", "engine-1"):
        assert (await get(app, f"/api/look/logs/{other}"))["text"] == ""


# --- keys ---


def look_paths(app: FastAPI) -> list[str]:
    values = {"project": "demo", "name": "webnav-8b", "split": "train", "log": "engine"}
    paths = [route.path for route in app.routes if isinstance(route, APIRoute)]
    return [
        re.sub(r"{(\w+)}", lambda match: values.get(match[1], "1"), path)
        for path in paths
        if path.startswith("/api/look/")
    ]


async def test_data_need_a_key_for_training_and_the_page_needs_none(root: Path, tmp_path: Path) -> None:
    app = guarded(root, tmp_path)
    paths = look_paths(app)
    assert len(paths) == 12
    for path in paths:
        for key, status in ((None, 401), ("wrong", 401), ("infer-only", 403)):
            async with client(app, key) as http:
                assert (await http.get(path)).status_code == status, (path, key)
    for path in ("/", "/page/app.js"):
        async with client(app, "infer-only") as http:
            assert (await http.get(path)).status_code == 200
    assert await get(app, f"{RUN}/history", "all")


async def test_a_key_sees_its_own_projects_only(root: Path, tmp_path: Path) -> None:
    app = guarded(root, tmp_path)
    assert len((await get(app, "/api/look/overview", "demo-only"))["models"]) == 2
    assert (await get(app, "/api/look/overview", "other-only"))["models"] == []
    for path in look_paths(app):
        if "/models/" in path:
            async with client(app, "other-only") as http:
                assert (await http.get(path)).status_code == 403, path
    app.state.server.gate.close("demo/webnav-8b")
    for key, reason in (
        ("all", "a step of 'demo/webnav-8b', which trains"),
        ("other-only", "a step, which trains"),
    ):
        live = (await get(app, "/api/look/overview", key))["live"]
        assert live["health"]["waits_for"] == reason


async def test_logs_and_memory_are_refused_to_keys_for_some_projects(root: Path, tmp_path: Path) -> None:
    app = guarded(root, tmp_path)
    for name in ("engine", "trainer", "server"):
        async with client(app, "demo-only") as http:
            answer = await http.get(f"/api/look/logs/{name}")
        assert answer.status_code == 403 and "all projects" in answer.text
    assert "line 499" in (await get(app, "/api/look/logs/engine", "all"))["text"]
    assert "machine" not in (await get(app, "/api/look/overview", "demo-only"))["live"]
    assert "machine" in (await get(app, "/api/look/overview", "all"))["live"]


# --- changes ---


async def marks_of(app: FastAPI, change: Any, key: str | None = None) -> list[dict[str, Any]]:
    """The marks that a stream sends until the second look after the change."""
    looks, real = asyncio.Semaphore(0), look.marks

    async def counted(*arguments: Any) -> dict[str, Any]:
        try:
            return await real(*arguments)
        finally:
            looks.release()

    async with client(app, key) as http:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(look, "marks", counted)
            stream = asyncio.create_task(http.get("/api/look/events"))
            async with asyncio.timeout(PATIENCE_SECONDS):
                await looks.acquire()
                change()
                for _ in range(3):
                    await looks.acquire()
        app.state.is_stopping = True
        answer = await stream
    assert answer.headers["content-type"].startswith("text/event-stream")
    parts = answer.text.split("\n\n")
    return [json.loads(part.split("data: ")[1]) for part in parts if "event: marks" in part]


async def test_a_new_row_changes_the_marks_of_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "LOOK_SECONDS", 0.05)
    first, second = make_demo(tmp_path, runs=2, steps=2, rollouts=8)
    marks = await marks_of(make_live(tmp_path), lambda: log(first, 3, {"train/reward": 1.0}))
    assert len(marks) == 2, "and is silent without a change"
    before, after = (sent["models"] for sent in marks)
    assert before[f"demo/{first.name}"] != after[f"demo/{first.name}"]
    assert before[f"demo/{second.name}"] == after[f"demo/{second.name}"]
    assert marks[0]["engine"] == "ready"
    assert [job[1] for job in marks[0]["jobs"]] == ["running", "queued"]


async def test_marks_of_other_projects_are_not_sent(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look, "LOOK_SECONDS", 0.05)
    (marks,) = await marks_of(guarded(root, tmp_path), lambda: None, "other-only")
    assert marks["models"] == {}
