"""How annexes join the client: packages with ART's names, judges, environments and so on (`plugins/` in the repository).

An annex names itself in the entry points of its distribution, so no module of the client imports one:

- `art.names`: an object that `art` has under the entry's name, such as `art.SkyPilotBackend`; a name with a dot is that of a
  module's member, such as `art.gather.GatherContext`. It is loaded when it is first used.
- `art.classes`: a class that goes in front of the client's class of that name, `Model` for example. It adds methods, fields
  and arguments, and calls `super()`.
"""

import functools
import importlib
import importlib.util
import pkgutil
import types
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")

# In the repository each annex has a folder `art` of its own. An installed package has one for all.
_client = importlib.import_module("art")
_client.__path__ = pkgutil.extend_path(_client.__path__, "art")


@functools.cache
def _entries(group: str) -> dict[str, list[EntryPoint]]:
    """The entries of a group by name. The first call reads the metadata of all installed packages: some milliseconds."""
    entries: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=group):
        entries.setdefault(entry.name, []).append(entry)
    return entries


def extended(kind: type[T]) -> type[T]:
    """The class with those of annexes in front of it. A decorator."""
    for entry in _entries("art.classes").get(kind.__name__, ()):
        parameters: Any = getattr(kind, "__parameters__", ())
        generic = (cast(Any, Generic)[parameters],) if parameters else ()
        members = {"__module__": kind.__module__, "__doc__": kind.__doc__}
        bases = (entry.load(), kind, *generic)
        kind = types.new_class(kind.__name__, bases, {}, lambda body, members=members: body.update(members))
    return kind


def names() -> list[str]:
    """The names that annexes give to `art`."""
    return sorted(name for name in _entries("art.names") if "." not in name)


def member(module: str, name: str) -> Any:  # Any: whatever an annex has under this name
    """A member that an annex gives to a module, or a module of `art`.

    Raises:
        AttributeError: there is neither.
    """
    path = f"{module}.{name}"
    for entry in _entries("art.names").get(path.removeprefix("art."), ()):
        return entry.load()
    if module == "art" and importlib.util.find_spec(path) is not None:
        return importlib.import_module(path)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
