"""The task that SkyPilot runs: sky.yaml with the program's settings. `sky launch scripts/sky.yaml` reads the file too."""

import importlib
import logging
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

TASK_FILE = Path(__file__).with_name("sky.yaml")
TASK_NAME = "art-server"
DISTRIBUTION = "agent-reinforcement-trainer"


def import_sky() -> Any:
    """SkyPilot's package. The type is `Any`, because SkyPilot is an optional extra.

    Raises:
        ImportError: SkyPilot is not installed; the message contains the command that installs it.
    """
    try:
        return importlib.import_module("sky")
    except ModuleNotFoundError as error:
        raise ImportError(
            "SkyPilotBackend needs SkyPilot, in an environment without the server: in a clone of the repository pip install "
            "'.[sky]', and the extra for your cloud, such as 'skypilot[aws]'"
        ) from error


def make_task(sky: Any, environment: dict[str, str], gpu: str | None, resources: Any, art_version: str | None) -> Any:
    """A sky.Task; see `SkyPilotBackend.initialize_cluster` for the arguments."""
    if gpu is not None and resources is not None:
        raise ValueError("pass gpu or resources, not both: resources names its accelerators")
    yaml = importlib.import_module("yaml")  # a dependency of SkyPilot
    config: dict[str, Any] = yaml.safe_load(TASK_FILE.read_text())
    if gpu is not None:
        config["resources"]["accelerators"] = gpu
    checkout = _find_checkout(art_version)
    if checkout is None:
        del config["workdir"]
        config["envs"]["ART_VERSION"] = version(DISTRIBUTION)
    else:
        config["workdir"] = str(checkout)
    task = sky.Task.from_yaml_config(config, secrets_overrides=[*environment.items()])
    return task if resources is None else task.set_resources(resources)


def read_environment(path: str | os.PathLike[str] | None) -> dict[str, str]:
    """The variables of a .env file. A variable without a value is left out."""
    if path is None:
        return {}
    dotenv = importlib.import_module("dotenv")  # a dependency of SkyPilot
    with open(path) as file:
        values: dict[str, str | None] = dotenv.dotenv_values(stream=file)
    return {name: value for name, value in values.items() if value}


def _find_checkout(art_version: str | None) -> Path | None:
    """The folder from which the machine installs the server; None: the release of this client's version."""
    here = Path(__file__).parents[4]
    named = here if art_version is None else Path(art_version)
    if art_version not in (None, version(DISTRIBUTION)) and not _is_checkout(named):
        logger.warning(
            "art_version=%r is not a checkout of %s and is ignored: the server gets this client's version",
            art_version,
            DISTRIBUTION,
        )
    return next((folder.resolve() for folder in (named, here) if _is_checkout(folder)), None)


def _is_checkout(folder: Path) -> bool:
    return (folder / "scripts" / "setup").is_file() and (folder / "art_server").is_dir()
