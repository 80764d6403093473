"""The names and import paths of ART that `import art` finds."""

import subprocess
import sys

import pytest

import art


def test_names_of_art_are_imported_at_their_first_use():
    names = {*art._MODULE_BY_NAME, "dev", "rewards"}
    assert {"SkyPilotBackend", "trajectory"} <= names <= set(dir(art))
    assert all(getattr(art, name) is not None for name in names)


def test_names_of_arts_modules_are_there():
    code = (
        "import art; art.types.TrainConfig(beta=0); art.types.TrainSFTConfig(); art.types.TrainResult;"
        "art.backend.AnyModel; art.backend.AnyTrainableModel; art.trajectories.TrajectoryGroup;"
        "assert art.types.LocalTrainResult is art.TrainResult;"
        "assert art.local.LocalBackend is art.LocalBackend; from art import dev; dev.TrainSFTConfig();"
        "from art.skypilot.backend import SkyPilotBackend; assert SkyPilotBackend is art.SkyPilotBackend"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "first",
    ["art_compat.models", "art_compat.local", "art_compat.coroutines", "art.core.model", "art.model", "art.gather"],
)
def test_any_module_can_be_imported_first(first: str):
    """`art` names classes of `art_compat`, whose modules import modules of `art`."""
    code = f"import {first}, art; from art.model import TrainableModel; assert TrainableModel is art.TrainableModel"
    subprocess.run([sys.executable, "-c", code], check=True)
