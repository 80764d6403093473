"""Type checkers read what runs: pyright and mypy over programs, with the wheel in place of the repository. Needs no network."""

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

PROGRAM = """
import asyncio

import art
from art.local import LocalBackend
from art.utils import iterate_dataset, limit_concurrency


@limit_concurrency(4)
async def rollout(model: art.TrainableModel, question: str) -> art.Trajectory:
    return art.Trajectory(messages_and_choices=[{"role": "user", "content": question}], reward=1.0)


async def roll_out_group(model: art.TrainableModel, question: str, config: None) -> art.TrajectoryGroup:
    return await art.TrajectoryGroup(rollout(model, question) for _ in range(4))


async def main() -> None:
    settings = art.dev.InternalModelConfig(init_args=art.dev.InitArgs(max_seq_length=1024))
    model = art.TrainableModel(name="a", project="p", base_model="art/tiny", _internal_config=settings)
    backend = LocalBackend(in_process=True)
    await model.register(backend)
    for batch in iterate_dataset(["question"], groups_per_step=1):
        groups = await art.gather_trajectory_groups(
            art.TrajectoryGroup(rollout(model, question) for _ in range(4)) for question in batch.items
        )
        result = await model.train(trajectory_groups=groups, _config={"epsilon": 0.2})
        await model.train(groups, config=art.TrainConfig(learning_rate=1e-5))
        await backend.train(model, groups, learning_rate=1e-5)
        print(result.step, result.metrics)
    model.metrics_builder("eval").add_cost("judge", 0.01)
    trajectory = await art.trajectory(rollout(model, "question"))
    trajectory.reward = art.rewards.exact_match("4", "4")
    evaluation = await art.evaluate(model, rollout, ["question"])
    print(evaluation.reward.mean)
    await art.PipelineTrainer(model, backend, roll_out_group, ["question"], None).train()
    await art.SkyPilotBackend("cluster").down()


asyncio.run(main())
"""
STAR = """
from art import *

model = TrainableModel(name="a", project="p", base_model="art/tiny")
backend = Backend()
metrics: dict[str, float] = {}
"""
"""Variables whose names are also names of modules."""
MISTAKES = {
    "from art import *\nutils.retry()\n": "utils",
    "import art\nart.TrajectoyGroup([])\n": "TrajectoyGroup",
    "import art\nart.types.TrainCofig()\n": "TrainCofig",
    "from art.rewards import exact_mach\nexact_mach('4', '4')\n": "exact_mach",
    "import art\nart.TrainableModel(name='a', project='p', base_model='b', base_modle='c')\n": "base_modle",
    "import art\nart.LocalBackend(in_proces=True)\n": "in_proces",
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel, and with the packages of this environment in place of an installation."""
    folder = tmp_path_factory.mktemp("installed")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(packages)
    # Python reads no .pth files of this folder, which would add the repository.
    (packages / "packages.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "venv" / "bin" / "python"


def check(checker: str, python: Path, text: str) -> tuple[bool, str]:
    """Whether the checker has no error in a program, and what it prints."""
    program = python.parents[2] / "program.py"
    program.write_text(text)
    return check_files(checker, python, [program])


def check_files(checker: str, python: Path, files: Sequence[Path]) -> tuple[bool, str]:
    cache = python.parents[2] / "cache"
    commands = {
        "mypy": ["-m", "mypy", "--python-executable", str(python), "--cache-dir", str(cache)],
        "pyright": ["-m", "pyright", "--pythonpath", str(python)],
    }
    command = [sys.executable, *commands[checker], *files]
    ran = subprocess.run(command, cwd=files[0].parent, capture_output=True, text=True, check=False)
    return ran.returncode == 0, ran.stdout + ran.stderr


def test_the_wheel_is_read_and_not_the_repository(python: Path) -> None:
    code = "import art, art_compat; print(art.__path__, art_compat.__path__)"
    ran = subprocess.run([python, "-c", code], cwd=python.parent, capture_output=True, text=True, check=True)
    assert str(python.parents[1]) in ran.stdout and str(ROOT) not in ran.stdout


@pytest.mark.parametrize("checker", ["pyright", "mypy"])
def test_a_program_with_arts_arguments_has_no_error(checker: str, python: Path) -> None:
    passes, output = check(checker, python, PROGRAM)
    assert passes, output


@pytest.mark.parametrize("checker", ["pyright", "mypy"])
def test_a_star_import_has_the_names_that_it_has_at_run_time(checker: str, python: Path) -> None:
    passes, output = check(checker, python, STAR)
    assert passes, output


@pytest.mark.parametrize("checker", ["pyright", "mypy"])
def test_the_examples_have_no_error(checker: str, python: Path, tmp_path: Path) -> None:
    files = [Path(shutil.copy(file, tmp_path)) for file in (ROOT / "examples").glob("*.py")]
    passes, output = check_files(checker, python, files)
    assert passes, output


@pytest.mark.parametrize("checker", ["pyright", "mypy"])
@pytest.mark.parametrize("mistake", MISTAKES, ids=MISTAKES.values())
def test_a_misspelt_name_is_an_error(checker: str, mistake: str, python: Path) -> None:
    passes, output = check(checker, python, mistake)
    assert not passes and MISTAKES[mistake] in output, output
