"""The versions that the constraints name for an extra."""

import tomllib
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
ALIASES = {
    extra: requirements[0]
    for extra, requirements in EXTRAS.items()
    if len(requirements) == 1 and requirements[0].startswith(PROJECT["name"])
}
LOCKED = sorted(set(EXTRAS) - set(ALIASES))
PYTHONS = ("3.11", "3.12", "3.13")
CLIENT_PYTHONS = (*PYTHONS, "3.14")
SERVERS = ("server", "gpu")
"""The extras that have no packages for Python 3.14."""


def pythons(extra: str) -> tuple[str, ...]:
    """The versions of Python for which an extra is meant."""
    return PYTHONS if extra in SERVERS else CLIENT_PYTHONS


def constraints(extra: str) -> list[str]:
    return (ROOT / "constraints" / f"{extra}.txt").read_text().splitlines()


def pins(extra: str, python: str, machine: str = "x86_64") -> dict[str, str]:
    """The version of each package on Linux under a Python."""
    environment = {
        **default_environment(),
        "python_version": python,
        "python_full_version": f"{python}.1",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": machine,
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    versions: dict[str, str] = {}
    for line in constraints(extra):
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate(environment):
            continue
        (specifier,) = requirement.specifier
        assert requirement.name not in versions, f"{extra}: two versions of {requirement.name}"
        versions[requirement.name] = specifier.version
    return versions
