"""Mistakes of newcomers on a real server: few lines, the cause, and a remedy that works when it is followed."""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from tests.live import Server, register, train_one_step
from tests.long.misuse.http_uses import KEYS
from tests.long.misuse.page import USES, Measured, sentence, write_page
from tests.long.misuse.use import MAX_LINES, Ended, Use, run
from tests.waiting import wait_until


@pytest.fixture(scope="session")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with keys that takes hosts, without an engine."""
    server = Server(tmp_path_factory.mktemp("keyed"))
    (server.path / "keys").write_text(KEYS)
    server.arguments = ["--engines", "0", "--ranks", "0", "--api-key-file", str(server.path / "keys")]
    server.start()

    def answers() -> bool:
        try:
            return httpx.get(f"{server.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_until(answers)
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def environment(server: Server, keyed: Server) -> dict[str, str]:
    """The variables of all uses. The server has the models that uses name."""
    register(server, "kept")
    train_one_step(server, "kept")
    register(server, "agent", project="uses")
    known = {name: value for name, value in os.environ.items() if not name.startswith(("ART_", "OPENAI_"))}
    return {
        **known,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "ART_SERVER_URL": server.url,
        "KEYED_URL": keyed.url,
        "SERVER_FOLDER": str(server.path / "art"),
    }


@pytest.fixture(scope="session")
def table() -> Iterator[list[Measured]]:
    """What has been measured. ART_TEST_PAGE=1 writes the page in the end; uses that did not run keep their rows."""
    rows: list[Measured] = []
    yield rows
    if os.environ.get("ART_TEST_PAGE"):
        write_page(rows)


@pytest.fixture(scope="session")
def mended() -> dict[tuple[str, ...], Ended]:
    """How mended forms ended. Several uses have the same."""
    return {}


def without_places(text: str, folder: Path, environment: Mapping[str, str]) -> str:
    """The text without addresses and folders of this run."""
    for name, shown in (
        ("ART_SERVER_URL", "http://127.0.0.1:7623"),
        ("KEYED_URL", "http://127.0.0.1:7633"),
        ("SERVER_FOLDER", ".art"),
    ):
        text = text.replace(environment[name], shown)
    text = re.sub(r"\b[0-9a-f]{32}\b", "0" * 8, text)  # sessions
    port = environment["ART_SERVER_URL"].rpartition(":")[2]
    return re.sub(rf"\b{port}\b", "7623", text.replace(f"{folder}/", "").replace(str(folder), "."))


@pytest.mark.parametrize("use", USES, ids=lambda use: use.name.replace(" ", "-"))
def test_a_wrong_use_names_its_cause_and_a_remedy_that_works(
    use: Use,
    tmp_path: Path,
    environment: dict[str, str],
    table: list[Measured],
    mended: dict[tuple[str, ...], Ended],
) -> None:
    ended = run(use.command(use.wrong, tmp_path), tmp_path, environment)
    printed = without_places(ended.printed, tmp_path, environment)
    print(printed)
    assert re.search(use.cause, printed) and re.search(use.remedy, printed)
    assert len(ended.lines) <= MAX_LINES and (use.template or "Traceback" not in printed)
    assert (ended.status == 0) == use.is_warning
    table.append(Measured(use.name, len(ended.lines), sentence(use, Ended(printed, ended.status))))
    key = (use.mended, use.template, *map(str, use.files.items()))
    if key not in mended:
        mended[key] = run(use.command(use.mended, tmp_path), tmp_path, environment, use.first_sign)
    done = mended[key]
    print(done.printed)
    assert done.status == 0 and len(done.lines) <= MAX_LINES and not re.search(use.cause, done.printed)
