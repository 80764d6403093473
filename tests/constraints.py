"""The versions that the constraints name for an extra."""

from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


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
    found: dict[str, str] = {}
    for line in constraints(extra):
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate(environment):
            continue
        (specifier,) = requirement.specifier
        assert requirement.name not in found, f"{extra}: two versions of {requirement.name}"
        found[requirement.name] = specifier.version
    return found
