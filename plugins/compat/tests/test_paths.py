"""The names and import paths of ART that `import art` finds."""

import subprocess
import sys

import art
from art import annexes


def test_annexes_add_names_that_are_found_by_entry_points():
    added = annexes.names()
    assert {"SkyPilotBackend", "trajectory"} <= set(added) <= set(dir(art))
    assert all(getattr(art, name) is not None for name in added)


def test_names_of_arts_modules_are_there():
    code = (
        "import art; art.types.TrainConfig(beta=0); art.types.TrainSFTConfig(); art.types.TrainResult;"
        "art.backend.AnyModel; art.backend.AnyTrainableModel; art.trajectories.TrajectoryGroup;"
        "assert art.local.LocalBackend is art.LocalBackend; from art import dev; dev.TrainSFTConfig();"
        "from art.skypilot.backend import SkyPilotBackend; assert SkyPilotBackend is art.SkyPilotBackend"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
