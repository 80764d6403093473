"""What `_type` names: known, imported, and checked."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from art.finetune import components
from art.finetune.components import Kind, check, is_code, load

AGENT = """\
import functools, os
from json import dumps
from os.path import *

def some_decorator(function):
    @functools.wraps(function)
    def wrapper(*arguments, **options): ...
    return wrapper

async def answer(question): ...
def by_row(row, llms, seed=1, *rest, timeout=5, **others): ...
def other_name(task, rollout): ...
def nothing(): ...
def two(question, task): ...
def two_others(task, place): ...
def by_position(question, /): ...
def by_keyword(*, temperature): ...

def score(row, output): ...
def of_all(trajectory, output, row, scale=1.0): ...
def of_answer(answer): ...

@some_decorator
def decorated(question, row): ...

class Trainer: ...
class Called:
    def __call__(self, question): ...
called, number = Called(), 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("agent.py").write_text(AGENT)
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def fake_toolkit(kind: Kind) -> list[str]:
    return ["react_agent"] if kind == "workflow" else []


def use(kind: Kind, name: str) -> None:
    """Checks a type, and imports its code."""
    check(kind, name)
    if is_code(kind, name):
        load(kind, name)


GOOD: list[tuple[Kind, str]] = [
    ("workflow", "agent.py:answer"),
    ("workflow", "./agent.py:answer"),
    ("workflow", "agent:answer"),
    ("workflow", "agent.py:by_row"),
    ("workflow", "agent.py:other_name"),
    ("workflow", "agent.py:nothing"),
    ("workflow", "agent.py:decorated"),
    ("workflow", "agent.py:called"),
    ("workflow", "agent.py:join"),
    ("workflow", "agent.py:dumps"),
    ("trainer", "art.finetune.interfaces:Trainer"),
    ("workflow", "json:dumps"),
    ("workflow", "command"),
    ("evaluator", "agent.py:score"),
    ("evaluator", "agent.py:of_all"),
    ("evaluator", "ruler"),
    ("trainer", "agent.py:Trainer"),
    ("trainer", "openpipe_art_trainer"),
    ("trainer_adapter", "openpipe_art_trainer_adapter"),
    ("trajectory_builder", "openpipe_art_traj_builder"),
    ("dataset", "agent.py:two_others"),
    ("dataset", "agent.two_others"),
]


@pytest.mark.parametrize(("kind", "name"), GOOD)
def test_components_are_found(kind: Kind, name: str) -> None:
    use(kind, name)


BAD: list[tuple[Kind, str, str]] = [
    ("workflow", "agent.py:answr", "agent.py has no 'answr': did you mean 'answer'?"),
    ("workflow", "agent.py:_", "agent.py has no '_': known: functools, os, dumps, "),
    ("workflow", "none.py:answer", "no such file: "),
    ("workflow", "agent.py", "unknown type 'agent.py'; known: command, package.module:NAME or path/file.py:NAME"),
    ("workflow", "agent.py:", "names nothing: write package.module:NAME or path/file.py:NAME"),
    ("workflow", ":answer", "names nothing"),
    ("workflow", "agent.py:an swer", "names nothing"),
    (
        "workflow",
        "no_such_package.module:f",
        "No module named 'no_such_package': install it, or run the command in the",
    ),
    ("workflow", "package.none:f", "No module named 'package.none'"),
    ("workflow", "a b:f", "No module named 'a b'"),
    ("workflow", "agent.deeper:f", "No module named 'agent.deeper'; 'agent' is not a package"),
    ("workflow", "package:f", "has no 'f': there are none"),
    (
        "workflow",
        "broken.py:f",
        "broken.py cannot be imported: IndentationError: expected an indented block after function definition",
    ),
    ("workflow", "agent.py:two", "two cannot be called, because of its parameter 'task'"),
    ("workflow", "agent.py:two_others", "two_others cannot be called, because of its parameter 'place'"),
    ("workflow", "agent.py:by_position", "takes 'question' by position only"),
    ("workflow", "agent.py:Trainer", "'Trainer' is a class"),
    ("evaluator", "agent.py:of_answer", "the parameters of this evaluator can be row, output, trajectory"),
    ("evaluator", "agent.py:answer", "because of its parameter 'question'"),
    (
        "evaluator",
        "exact_mach",
        "unknown type 'exact_mach'; did you mean 'exact_match'?; known: command, contains, exact_match, ",
    ),
    (
        "workflow",
        "react_agent",
        "known: command, package.module:NAME or path/file.py:NAME; components of NVIDIA's toolkit need",
    ),
    ("trainer", "agent.py:Trainr", "did you mean 'Trainer'?"),
    ("dataset", "rows", "unknown type 'rows'"),
]


@pytest.mark.parametrize(("kind", "name", "words"), BAD)
def test_what_is_no_component_is_one_sentence(kind: Kind, name: str, words: str) -> None:
    Path("package").mkdir()
    Path("package/__init__.py").write_text("")
    Path("broken.py").write_text("def f():\nreturn 1\n")
    with pytest.raises(ValueError) as error:
        use(kind, name)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_check_imports_nothing(folder: Path) -> None:
    Path("agent.py").write_text("raise SystemExit('imported')")
    for name in ("agent.py:answer", "agent:answer", "no_such_package.module:f"):
        check("workflow", name)


def test_components_of_the_toolkit() -> None:
    check("workflow", "react_agent", fake_toolkit)
    with pytest.raises(ValueError, match="did you mean 'react_agent'"):
        check("workflow", "react_agnt", fake_toolkit)
    assert components.is_of_toolkit("workflow", "react_agent")
    assert not components.is_of_toolkit("workflow", "command") and not components.is_of_toolkit("workflow", "a.py:b")


def test_a_file_is_loaded_once_and_can_import_its_neighbours() -> None:
    Path("below").mkdir()
    Path("below/helper.py").write_text("import task\nVALUE = 3\n")
    Path("below/task.py").write_text(
        "import helper\ndef answer(question): return helper.VALUE\ndef score(row): return answer\n"
    )
    answer, score = load("workflow", "below/task.py:answer"), load("evaluator", "below/task.py:score")
    assert answer("x") == 3 and score({}) is answer and sys.modules["helper"].task.answer is answer


def test_a_file_whose_name_a_module_has_is_loaded_beside_it() -> None:
    Path("json.py").write_text("def answer(question): return question\n")
    assert load("workflow", "json.py:answer")("x") == "x"
    assert "dumps" in vars(sys.modules["json"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "import no_such_package",
            "task.py cannot be imported: ModuleNotFoundError: No module named 'no_such_package'",
        ),
        ("x = 1\ny = 1 / 0\n", "ZeroDivisionError: division by zero ({folder}/task.py:2)"),
        ("raise SystemExit", "cannot be imported: SystemExit"),
        ("from os.path import *", "task.py has no 'answer'"),
        ("x = (", "task.py cannot be imported: SyntaxError: '(' was never closed (task.py, line 1)"),
        ("answer = 3", "'task.py:answer' is of type int: name a function or a class"),
        ("import functools\nanswer = functools.partial(lambda a, b, c: 1, 1)", "because of its parameter 'c'"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(folder: Path, text: str, words: str) -> None:
    Path("task.py").write_text(text)
    with pytest.raises(ValueError) as error:
        load("workflow", "task.py:answer")
    assert words.format(folder=folder) in str(error.value) and "\n" not in str(error.value)
    assert "task" not in sys.modules or "raise" not in text


def test_built_in_parts_are_classes() -> None:
    assert load("trainer", "openpipe_art_trainer").__name__ == "ArtTrainer"
    assert load("trainer_adapter", "openpipe_art_trainer_adapter").__name__ == "ArtTrainerAdapter"
    assert load("trajectory_builder", "openpipe_art_traj_builder").__name__ == "ArtTrajectoryBuilder"


FORMER = """\
from art.finetune import ArtTrainer, ArtTrainerAdapter, ArtTrajectoryBuilder

class Begins(ArtTrajectoryBuilder):
    async def start_run(self, run_id, meta): ...
class Submits(ArtTrainerAdapter):
    async def submit(self, trajectories): ...
class Lower(Submits): ...
class Bare:
    async def submit(self, trajectories): ...
class OneEpoch(ArtTrainer):
    async def run_epoch(self, epoch, run_id): ...

class Helper(ArtTrainerAdapter):
    async def train(self, groups, epoch): return await self.submit(groups)
    async def submit(self, trajectories): ...
class BareTrainer:
    async def run(self, num_epochs): ...
    async def initialize(self): ...
class Shaped(ArtTrajectoryBuilder):
    def compute_reward(self, *figures): return self.finalize(*figures)
    def finalize(self, *figures): ...
class Native(ArtTrajectoryBuilder):
    sample = dict.fromkeys  # has no module
    def start_run(self): ...
"""


@pytest.mark.parametrize(
    ("kind", "name", "former", "today"),
    [
        ("trajectory_builder", "Begins", "start_run", "sample"),
        ("trainer_adapter", "Submits", "submit", "train"),
        ("trainer_adapter", "Lower", "submit", "train"),
        ("trainer_adapter", "Bare", "submit", "train"),
        ("trainer", "OneEpoch", "run_epoch", "run"),
    ],
)
def test_a_former_method_is_refused_with_the_method_of_today(kind: Kind, name: str, former: str, today: str) -> None:
    Path("parts.py").write_text(FORMER)
    with pytest.raises(ValueError, match=f"parts.py:{name} has the method '{former}', .* '{today}'"):
        load(kind, f"parts.py:{name}")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("trainer_adapter", "Helper"),
        ("trainer", "BareTrainer"),
        ("trajectory_builder", "Shaped"),
        ("trajectory_builder", "Native"),
    ],
)
def test_a_part_may_have_own_methods_of_former_names(kind: Kind, name: str) -> None:
    Path("parts.py").write_text(FORMER)
    assert load(kind, f"parts.py:{name}").__name__ == name


def test_entry_points_name_components(folder: Path) -> None:
    Path("plugged-1.0.dist-info").mkdir()
    Path("plugged-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    Path("plugged-1.0.dist-info/entry_points.txt").write_text(
        "[art.finetune]\ncity_agent = plugged:answer\nexact_match = plugged:answer\n"
    )
    Path("plugged.py").write_text("def answer(question): return 'Rome'\n")
    sys.path.insert(0, str(folder))
    check("workflow", "city_agent")
    assert load("workflow", "city_agent")("x") == "Rome"
    with pytest.raises(ValueError, match="known: city_agent, command"):
        check("workflow", "cty")
    check("evaluator", "exact_match")  # the built-in one, whatever is installed
