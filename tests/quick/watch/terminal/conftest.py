"""A folder of runs with hostile texts, the same served over HTTP, and the command `art` in this process."""

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console

from art_watch.terminal.cli import main as art
from art_watch.view import make_view
from tests.http_server import served
from tests.makers.demo import make_demo

ESCAPES = "\x1b[31mred\x1b[0m\x07\x9b2J\u202eltr\x00 [bold]no markup[/] :smile:"
SHOWN_ESCAPES = "␛[31mred␛[0m␇\\u009b2J\\u202eltr␀ [bold]no markup[/] :smile:"


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Runs `art` with arguments."""
    monkeypatch.delenv("ART_API_KEY", raising=False)
    for name in ("FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: object) -> Ran:
        capsys.readouterr()
        code: Any = 0
        try:
            art([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models demo/webnav-8b and demo/webnav-lr2e5 of six steps; the first step has the special groups."""
    root = tmp_path_factory.mktemp("demo")
    make_demo(root, runs=2, steps=6, rollouts=48)
    return root


@pytest.fixture(scope="session")
def url(folder: Path) -> Iterator[str]:
    """The page's routes over the same folder."""
    with served(make_view(folder)) as address:
        yield address


def screen(width: int = 80, **options: Any) -> Console:
    """A terminal whose text `shown` returns."""
    return Console(
        file=io.StringIO(),
        width=width,
        force_terminal=True,
        highlight=False,
        markup=False,
        emoji=False,
        **{"color_system": None, "legacy_windows": False, **options},
    )


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines)
