"""The code that a `_type` names. `check` checks the code without an import of a user's module, `load` imports the code.

A `_type` is a built-in name, `package.module:name`, `path/file.py:name`, an entry point of the group `art.finetune`, or a
component of NVIDIA's toolkit. `workflows` and `scoring` make built-in workflows and evaluators.
"""

import ast
import functools
import importlib
import importlib.util
import inspect
import symtable
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol, TypeAlias

from art.finetune.limits import in_thread
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
"""The arguments that a function can get, by the names of its parameters. The other kinds are classes, which are called by
position."""
FORMER_METHODS: dict[Kind, dict[str, str]] = {
    "trajectory_builder": {"initialize": "__init__", "start_run": "sample", "finalize": "sample"},
    "trainer_adapter": {"initialize": "__init__", "submit": "train", "wait_until_complete": "train"},
    "trainer": {"initialize": "__init__", "bind_components": "__init__", "run_epoch": "run", "cleanup": "run"},
}
"""Methods of parts that nothing calls any more, each with the method of today for the same work."""
VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
HOW_TO_NAME = "package.module:NAME or path/file.py:NAME"


class Toolkit(Protocol):
    """What this module needs of NVIDIA's toolkit."""

    def names(self, kind: Kind) -> list[str]:
        """The `_type`s that are registered with the toolkit."""
        ...


def check(kind: Kind, type_name: str, toolkit: Toolkit | None = None) -> None:
    """Checks that a component exists, and that a function can be called. No module of a user is imported.

    Raises:
        ValueError: the component does not exist, or cannot be called. The message has the known types.
    """
    target = _target(kind, type_name)
    if target is not None:
        module, name = target
        file = Path(module) if module.endswith(".py") else _source_of(module)
        if file is not None:
            _check_source(kind, file, name)
    elif type_name not in BUILT_IN[kind] and not (toolkit and type_name in toolkit.names(kind)):
        raise ValueError(_unknown(kind, type_name, toolkit))


def load(kind: Kind, type_name: str) -> Callable[..., Any]:
    """The function or class that a type names. Imports the module, and adds the module's folder to `sys.path`, as Python does for
    a program. Built-in workflows and evaluators are no such functions.

    Raises:
        ValueError: the module cannot be imported, has no such name, or the name is nothing that can be called; or a part has a
            method that nothing calls any more.
    """
    if type_name in BUILT_IN_CLASSES:
        module, name = BUILT_IN_CLASSES[type_name].split(":")
        return getattr(importlib.import_module(module), name)
    target = _target(kind, type_name)
    if target is None:
        raise ValueError(_unknown(kind, type_name, None))
    module, name = target
    loaded: Any = getattr(_import(module), name, None)
    if loaded is None:
        raise ValueError(_no_such_name(module, name, vars(_import(module))))
    if not callable(loaded):
        raise ValueError(f"{type_name!r} is of type {type(loaded).__name__}: name a function or a class")
    if kind in PARAMETERS:
        parameters = _parameters(loaded)
        by_position = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_ONLY]
        required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
        _check_parameters(kind, name, required, by_position)
    if kind in FORMER_METHODS and isinstance(loaded, type):
        _check_methods(kind, type_name, loaded)
    return loaded


async def call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """The result of a user's function, or of an object that can be called. The function gets the arguments that its parameters
    name. A required parameter of another name gets the question. Plain functions run in threads."""
    named: dict[str, Any] = {}
    for parameter in _parameters(function):
        if parameter.name in arguments:
            named[parameter.name] = arguments[parameter.name]
        elif parameter.default is parameter.empty:
            named[parameter.name] = arguments["question"]
    work = functools.partial(function, **named)
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return await work()
    result = await in_thread(work)
    return await result if inspect.isawaitable(result) else result


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function, without `*rest` and `**others`."""
    parameters = inspect.signature(function).parameters.values()
    return [parameter for parameter in parameters if parameter.kind not in VARIABLE]


def is_of_toolkit(kind: Kind, type_name: str) -> bool:
    """Whether only NVIDIA's toolkit can know a type."""
    return type_name not in BUILT_IN[kind] and _target(kind, type_name) is None


def _target(kind: Kind, type_name: str) -> tuple[str, str] | None:
    """A module (or its file) and a name in the module: `'agent.py:answer' -> ('agent.py', 'answer')`. None: the type is
    built in, or names no code."""
    if type_name in BUILT_IN[kind]:
        return None
    target = type_name if ":" in type_name else _entries().get(type_name, "")
    if not target and kind == "dataset" and "." in type_name:  # NVIDIA's form, package.module.name
        target = ":".join(type_name.rsplit(".", 1))
    if not target:
        return None
    module, _, name = target.rpartition(":")
    if not module or not name.isidentifier():
        raise ValueError(f"{target!r} names nothing: write {HOW_TO_NAME}")
    return module, name


def _entries() -> dict[str, str]:
    """The entry points of all installed packages."""
    return {entry_point.name: entry_point.value.split("[")[0].strip() for entry_point in entry_points(group=GROUP)}


def _unknown(kind: Kind, type_name: str, toolkit: Toolkit | None) -> str:
    if type_name == "dpo_traj_builder" or type_name.startswith("nemo_customizer_"):
        ours = next(iter(BUILT_IN[kind]))
        return f"DPO and NeMo Customizer are refused: use {ours}, or train chosen answers with model.train_sft"
    known = sorted({*BUILT_IN[kind], *_entries(), *(toolkit.names(kind) if toolkit else ())})
    near = nearest(type_name, known)
    meant = f"; did you mean {near!r}?" if near else ""
    text = f"unknown type {type_name!r}{meant}; known: {', '.join([*known, HOW_TO_NAME])}"
    if toolkit is None and kind in PARAMETERS:
        text += "; components of NVIDIA's toolkit need nvidia-nat-core and nvidia-nat-eval in this environment"
    return text


# --- modules ------------------------------------------------------------------------------------------------------


def _source_of(module: str) -> Path | None:
    """The source file of a module, found without an import of the packages around the module. None: the module has no source."""
    importlib.invalidate_caches()  # a file may be new
    _reach(Path.cwd())
    first, *rest = module.split(".")
    spec = importlib.util.find_spec(first) if first else None
    folders = getattr(sys.modules.get(first), "__path__", spec and spec.submodule_search_locations)
    for part in rest:
        spec = PathFinder.find_spec(part, list(folders)) if folders else None
        folders = spec and spec.submodule_search_locations
    if spec is None:
        raise ValueError(f"no module {module!r}: install it, or run the command in the folder it is in ({Path.cwd()})")
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _reach(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _import(name: str) -> ModuleType:
    """The module with a name, or the module of a file that ends in .py."""
    file = Path(name).resolve() if name.endswith(".py") else None
    _reach(file.parent if file else Path.cwd())
    try:
        return _import_file(file) if file else importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of any kind: it is the user's code
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
        last = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames[-1].filename != __file__ else ""
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{name} cannot be imported: {what}{last}") from error


def _import_file(file: Path) -> ModuleType:
    """The module of a file; the same module at each call. The module has the file's name, unless another module has that name."""
    for module in list(sys.modules.values()):
        origin = getattr(module, "__file__", None)  # modules in C have none
        if isinstance(origin, str) and Path(origin).name == file.name and Path(origin).resolve() == file:
            return module
    name = file.stem if file.stem not in sys.modules else str(file)
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


def _check_methods(kind: Kind, type_name: str, part: type[Any]) -> None:
    """Checks that a part does its work in the methods of today. A part with an own method of today may have any others.

    Raises:
        ValueError: the part has a former method in place of the method of today.
    """
    for former, today in FORMER_METHODS[kind].items():
        method = getattr(part, today, None)
        is_own = method is not None and not getattr(method, "__module__", "").startswith("art.finetune.")
        if hasattr(part, former) and not is_own:
            raise ValueError(
                f"{type_name} has the method {former!r}, which nothing calls any more: override {today!r} in its place "
                "(docs/howto/finetune-parts.md)"
            )


# --- sources ------------------------------------------------------------------------------------------------------


def _check_source(kind: Kind, file: Path, name: str) -> None:
    """Checks that a module's source has the name, and that a function can be called.

    Raises:
        ValueError: the source lacks the name, or the function cannot be called.
    """
    text = read_text(file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the import shows the warnings
            body = ast.parse(text, str(file)).body
            symbols = symtable.symtable(text, str(file), "exec").get_symbols()
    except (SyntaxError, ValueError) as error:  # ValueError: a zero byte
        line = getattr(error, "lineno", None) or 1
        raise ValueError(f"{file}:{line}: not valid Python: {getattr(error, 'msg', error)}") from error
    names = [symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()]
    if name not in names and not _binds_others(body, names):
        raise ValueError(_no_such_name(str(file), name, names))
    for statement in body:
        is_definition = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if kind not in PARAMETERS or not is_definition or statement.name != name:
            continue
        if isinstance(statement, ast.ClassDef):
            raise ValueError(f"{name!r} is a class: the {kind} is a function, or an object that can be called")
        if not statement.decorator_list:
            arguments = statement.args
            _check_parameters(kind, name, _required(arguments), [argument.arg for argument in arguments.posonlyargs])


def _required(arguments: ast.arguments) -> list[str]:
    """The parameters without a default."""
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    by_keyword = [argument.arg for argument, default in pairs if default is None]
    return positional[: len(positional) - len(arguments.defaults)] + by_keyword


def _binds_others(body: Iterable[ast.stmt], names: Sequence[str]) -> bool:
    """Whether a module has names that its source does not show."""
    stars = (isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*" for statement in body)
    return "__getattr__" in names or any(stars)


def _no_such_name(module: str, name: str, names: Iterable[str]) -> str:
    public = [known for known in names if not known.startswith("_")]
    return f"{module} has no {name!r}: {hint(name, public)}"


def _check_parameters(kind: Kind, name: str, required: Sequence[str], by_position: Sequence[str]) -> None:
    """Checks that a function can be called with the arguments of a workflow or an evaluator, by the names of its parameters.

    `required` are the parameters without a default, `by_position` the parameters that have to be passed by position.

    Raises:
        ValueError: the function cannot be called.
    """
    if by_position:
        raise ValueError(f"{name} takes {by_position[0]!r} by position only: remove the '/' from its parameters")
    known = PARAMETERS[kind]
    others = [parameter for parameter in required if parameter not in known]
    is_single = kind == "workflow" and len(others) == 1 and "question" not in required
    if others and not is_single:
        single = ", or a single other one that gets the question" if kind == "workflow" else ""
        raise ValueError(
            f"{name} cannot be called, because of its parameter {others[-1]!r}: the parameters of this {kind} can be "
            f"{', '.join(known)} in any selection{single}, and others with a default"
        )
