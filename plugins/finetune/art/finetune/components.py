"""What `_type` names. `locate` checks it without importing a user's module, `load` imports it.

A `_type` is a built-in name, `package.module:name`, `path/file.py:name`, an entry point of the group `art.finetune`, or a
component of NVIDIA's toolkit. `workflows` and `scoring` make built-in workflows and evaluators.
"""

import ast
import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, cast

from art.finetune.reading import hint, nearest, read_text

Kind: TypeAlias = Literal["workflow", "evaluator", "trajectory_builder", "trainer_adapter", "trainer", "dataset"]

GROUP = "art.finetune"
BUILT_IN: dict[Kind, dict[str, frozenset[str]]] = {
    "workflow": {"command": frozenset({"command"})},
    "evaluator": {
        "exact_match": frozenset({"ignore_case"}),
        "number_match": frozenset({"absolute", "relative"}),
        "regex_match": frozenset({"pattern"}),
        "json_match": frozenset({"schema"}),
        "ruler": frozenset({"judge_model", "base_url", "api_key", "rubric", "mode"}),
    },
    "trajectory_builder": {"openpipe_art_traj_builder": frozenset({"num_generations", "reward"})},
    "trainer_adapter": {"openpipe_art_trainer_adapter": frozenset({"backend", "training", "reward"})},
    "trainer": {"openpipe_art_trainer": frozenset({"reward"})},
    "dataset": {},
}
"""The built-in types of each kind, with their fields beside `_type`."""
BUILT_IN_CLASSES = {
    "openpipe_art_traj_builder": "art.finetune.rollouts:ArtTrajectoryBuilder",
    "openpipe_art_trainer_adapter": "art.finetune.training:ArtTrainerAdapter",
    "openpipe_art_trainer": "art.finetune.training:ArtTrainer",
}
PARAMETERS: dict[Kind, tuple[str, ...]] = {
    "workflow": ("question", "row", "rollout", "llms", "seed"),
    "evaluator": ("row", "output", "trajectory"),
}
"""What functions get by the names of their parameters. The other kinds are classes, which are called by position."""
HOW_TO_NAME = "package.module:NAME or path/file.py:NAME"


class Toolkit(Protocol):
    """What this module needs of NVIDIA's toolkit."""

    def names(self, kind: Kind) -> list[str]:
        """The `_type`s that are registered with it."""
        ...


@dataclass(frozen=True, slots=True)
class Located:
    """Where a component is."""

    source: Literal["built-in", "code", "toolkit"]
    module: str = ""
    """code: the module's name, or the path of its file."""
    name: str = ""
    file: Path | None = None
    """code: the file, if its source can be read."""


def locate(kind: Kind, type_name: str, toolkit: Toolkit | None = None) -> Located:
    """Where a component is. No module of a user is imported.

    Raises:
        ValueError: there is no such component, or its function cannot be called. The message has the known types.
    """
    found = _find(kind, type_name, toolkit)
    if found.source == "code" and found.file is not None:
        _check_source(kind, found.file, found.name)
    return found


def load(kind: Kind, type_name: str) -> Any:  # Any: a function or a class of the user
    """The function or class that a type names. Its module is imported, and its folder is added to `sys.path`, as Python does
    for a program. Built-in workflows and evaluators are not such functions.

    Raises:
        ValueError: it cannot be imported, or there is no such name, or it cannot be called.
    """
    if type_name in BUILT_IN_CLASSES:
        module, name = BUILT_IN_CLASSES[type_name].split(":")
        return getattr(importlib.import_module(module), name)
    found = _find(kind, type_name, None)
    if found.source != "code":
        raise ValueError(f"{type_name!r} is built in: it has no module of its own")
    module = _import(found)
    bound = cast("dict[str, Any]", module.__dict__)
    loaded: Any = module
    for part in found.name.split("."):
        try:
            loaded = getattr(loaded, part)
        except AttributeError:
            raise ValueError(_no_such_name(found.module, found.name, bound)) from None
    if not callable(loaded):
        raise ValueError(f"{type_name!r} is of type {type(loaded).__name__}: name a function or a class")
    if kind in PARAMETERS and not isinstance(loaded, type):
        try:
            parameters = inspect.signature(loaded).parameters.values()
        except (TypeError, ValueError):  # written in C
            return loaded
        _check_parameters(kind, found.name, parameters)
    return loaded


def is_of_toolkit(kind: Kind, type_name: str) -> bool:
    """Whether only NVIDIA's toolkit can know a type."""
    return ":" not in type_name and type_name not in BUILT_IN[kind] and type_name not in _entries()


def _find(kind: Kind, type_name: str, toolkit: Toolkit | None) -> Located:
    if type_name in BUILT_IN[kind]:
        return Located("built-in", name=type_name)
    target = type_name if ":" in type_name else _entries().get(type_name, "")
    if not target and kind == "dataset" and "." in type_name:  # NVIDIA's form
        target = ":".join(type_name.rsplit(".", 1))
    if target:
        return _find_code(target)
    if toolkit is not None and type_name in toolkit.names(kind):
        return Located("toolkit", name=type_name)
    if type_name.endswith(".py"):
        raise ValueError(f"name the {_noun(kind)} in the file: {type_name}:NAME")
    raise ValueError(_unknown(kind, type_name, toolkit))


def _unknown(kind: Kind, type_name: str, toolkit: Toolkit | None) -> str:
    known = sorted({*BUILT_IN[kind], *_entries(), *(toolkit.names(kind) if toolkit is not None else ())})
    near = nearest(type_name, known)
    parts = [f"unknown type {type_name!r}"]
    if near is not None:
        parts.append(f"did you mean {near!r}?")
    parts.append(f"known: {', '.join([*known, HOW_TO_NAME])}")
    if toolkit is None and kind != "dataset":
        parts.append("components of NVIDIA's toolkit need nvidia-nat-core and nvidia-nat-eval in this environment")
    return "; ".join(parts)


def _entries() -> dict[str, str]:
    """The entry points of all installed packages."""
    return {each.name: each.value.split("[")[0].strip() for each in entry_points(group=GROUP)}


def _noun(kind: Kind) -> str:
    return "function" if kind in PARAMETERS or kind == "dataset" else "class"


# --- modules ------------------------------------------------------------------------------------------------------


def _find_code(target: str) -> Located:
    module, _, name = target.rpartition(":")
    if not module or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{target!r} names nothing: write {HOW_TO_NAME}")
    if module.endswith(".py"):
        file = Path(module)
        if not file.is_file():
            raise ValueError(f"no such file: {file.absolute()}")
        return Located("code", module, name, file)
    return Located("code", module, name, _module_file(module))


def _module_file(module: str) -> Path | None:
    """The source of a module, found as the import would find it, but without importing the packages that it is in. None: it
    has no source."""
    if module in sys.builtin_module_names:
        return None
    importlib.invalidate_caches()  # a file may be new
    folders = [str(Path.cwd()), *sys.path]
    parts = module.split(".")
    for number, part in enumerate(parts):
        package = sys.modules.get(".".join(parts[: number + 1]))
        if number < len(parts) - 1 and package is not None and hasattr(package, "__path__"):
            folders = list(package.__path__)  # a package may have changed it
            continue
        # Without the names of its packages, because the finder would look for those among the imported modules.
        spec = importlib.machinery.PathFinder.find_spec(part, folders) if part.isidentifier() else None
        if spec is None:
            missing = ".".join(parts[: number + 1])
            raise ValueError(
                f"no module {missing!r}: install it, or run the command in the folder that it is in ({Path.cwd()})"
            )
        if number == len(parts) - 1:
            is_source = spec.origin is not None and spec.origin.endswith(".py")
            return Path(spec.origin) if is_source and spec.origin is not None else None
        if spec.submodule_search_locations is None:
            raise ValueError(f"no module {module!r}: {'.'.join(parts[: number + 1])!r} is a module and no package")
        folders = list(spec.submodule_search_locations)
    return None


def _import(found: Located) -> Any:  # Any: a module
    is_file = found.module.endswith(".py")
    folder = str(Path(found.module).absolute().parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        if is_file:
            return _import_file(Path(found.module).resolve())
        return importlib.import_module(found.module)
    except (Exception, SystemExit) as error:  # of any kind: it is the user's code
        raise ValueError(f"{found.module} cannot be imported: {_failure(error)}") from error


def _import_file(file: Path) -> Any:
    """The module of a file, the same each time. Its name is the file's, unless another module has that name."""
    for module in list(sys.modules.values()):
        origin = getattr(module, "__file__", None)  # modules in C have none
        if isinstance(origin, str) and Path(origin).name == file.name and Path(origin).resolve() == file:
            return module
    name = file.stem if file.stem not in sys.modules else f"{file.stem} ({file})"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _failure(error: BaseException) -> str:
    """The error in one line, with the last line of the user's code that it came from."""
    text = " ".join(str(error).split())
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frames = [each for each in traceback.extract_tb(error.__traceback__) if "importlib" not in each.filename]
    last = frames[-1] if frames else None
    return what if last is None or last.filename == __file__ else f"{what} ({last.filename}:{last.lineno})"


# --- sources ------------------------------------------------------------------------------------------------------


def _check_source(kind: Kind, file: Path, name: str) -> None:
    """Checks that a module's source has the name, and that a function can be called.

    Raises:
        ValueError: it does not, or it cannot.
    """
    text = read_text(file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the import shows them
            parsed = ast.parse(text, str(file))
    except (SyntaxError, ValueError) as error:  # ValueError: a zero byte
        line = getattr(error, "lineno", None) or 1
        raise ValueError(f"{file}:{line}: not valid Python: {getattr(error, 'msg', error)}") from error
    bound = dict(_bound(parsed.body))
    first, _, rest = name.partition(".")
    if first not in bound:
        if "*" in bound or "__getattr__" in bound:
            return
        raise ValueError(_no_such_name(str(file), first, bound))
    statement = bound[first]
    if rest or kind not in PARAMETERS:
        return
    if isinstance(statement, ast.ClassDef):
        raise ValueError(f"{name!r} is a class: the {kind} is a function, or an object that can be called")
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and not statement.decorator_list:
        _check_parameters(kind, name, _parameters(statement.args))


def _no_such_name(module: str, name: str, bound: Iterable[str]) -> str:
    names = [each for each in bound if not each.startswith("_")]
    return f"{module} has no {name!r}: {hint(name, names)}"


def _bound(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """The names that a module binds, each with its statement; "*" for names that the source does not show."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name, statement
            continue
        if isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                yield alias.asname or alias.name.split(".")[0], statement
            continue
        for part in ast.iter_child_nodes(statement):
            if isinstance(part, ast.stmt):
                yield from _bound([part])
            elif isinstance(part, ast.ExceptHandler | ast.match_case):
                yield from _bound(part.body)
            else:
                for each in ast.walk(part):
                    if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                        yield each.id, statement


def _parameters(given: ast.arguments) -> list[inspect.Parameter]:
    made: list[inspect.Parameter] = []
    positional = [*given.posonlyargs, *given.args]
    num_required = len(positional) - len(given.defaults)
    for number, each in enumerate(positional):
        kind = (
            inspect.Parameter.POSITIONAL_ONLY if each in given.posonlyargs else inspect.Parameter.POSITIONAL_OR_KEYWORD
        )
        default = inspect.Parameter.empty if number < num_required else None
        made.append(inspect.Parameter(each.arg, kind, default=default))
    for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        is_required = default is None
        required = inspect.Parameter.empty if is_required else None
        made.append(inspect.Parameter(each.arg, inspect.Parameter.KEYWORD_ONLY, default=required))
    return made


def _check_parameters(kind: Kind, name: str, parameters: Iterable[inspect.Parameter]) -> None:
    """Checks that a function can be called with what a workflow or an evaluator gets.

    Raises:
        ValueError: it cannot.
    """
    known = PARAMETERS[kind]
    given = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    by_position = [each.name for each in given if each.kind is each.POSITIONAL_ONLY]
    if by_position:
        raise ValueError(f"{name} takes {by_position[0]!r} by position only: remove the '/' from its parameters")
    others = [each.name for each in given if each.name not in known and each.default is each.empty]
    is_single = kind == "workflow" and len(others) == 1 and "question" not in [each.name for each in given]
    if not others or is_single:
        return
    single = ", or a single other one that gets the question" if kind == "workflow" else ""
    needs = f"{name} cannot be called, because of its parameter {others[-1]!r}"
    raise ValueError(
        f"{needs}: the parameters of this {kind} can be {', '.join(known)} in any selection{single}, and others with a default"
    )
