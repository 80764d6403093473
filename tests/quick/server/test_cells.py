"""Two servers behind one proxy, which maps a project to its server by the first part of the path (docs/scale.md)."""

import contextlib
import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

import art
from tests.quick.server.served import sample_group, serving

pytestmark = pytest.mark.anyio

DOCS = Path(__file__).parents[3] / "docs" / "scale.md"


@contextlib.asynccontextmanager
async def proxy(cells: Mapping[str, str]) -> AsyncIterator[str]:
    """What the page's Caddyfile does: strips a project's name from the path, and passes each part of an answer on at once."""

    async def forward(request: web.Request) -> web.StreamResponse:
        project, _, rest = request.path.removeprefix("/").partition("/")
        sent = {name: value for name, value in request.headers.items() if name.lower() != "host"}
        url = f"{cells[project]}/{rest}"
        async with session.request(
            request.method, url, params=request.query, headers=sent, data=request.content
        ) as answer:
            response = web.StreamResponse(
                status=answer.status, headers={"content-type": answer.headers["content-type"]}
            )
            await response.prepare(request)
            async for part in answer.content.iter_any():
                await response.write(part)
            return response

    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as session:
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def test_each_project_trains_on_its_own_server_behind_one_address(tmp_path: Path) -> None:
    async with serving(tmp_path / "one") as one, serving(tmp_path / "two") as two:
        cells = {"math": one.url, "games": two.url}
        async with proxy(cells) as address:
            for project, cell in (("math", one), ("games", two)):
                async with art.Backend(f"{address}/{project}") as backend:
                    model = art.TrainableModel(name="agent", project=project, base_model="art/tiny")
                    await model.register(backend)
                    result = await model.train([await sample_group(model)])
                    assert result.step == 1
                (registered,) = cell.server.registry.all()
                assert registered.id == f"{project}/agent" and registered.step == 1


def test_the_page_has_the_proxys_lines() -> None:
    (caddyfile,) = re.findall(r"```text\n(gpus\.example\.com.*?)```", DOCS.read_text(), re.DOTALL)
    assert re.findall(r"handle_path /(\w+)/\* \{\s+reverse_proxy ([\w.:-]+)", caddyfile) == [
        ("math", "cell-1:7623"),
        ("games", "cell-2:7623"),
    ]
