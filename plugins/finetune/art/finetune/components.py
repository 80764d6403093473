"""The code that a `_type` names. `check` knows the types, `load` imports the code, and `call` calls a function.

A `_type` is a built-in name, `package.module:name`, `path/file.py:name`, an entry point of the group `art.finetune`, or a
component of NVIDIA's toolkit. `workflows` and `scoring` make built-in workflows and evaluators.
"""

import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias

from art.finetune.limits import in_thread
from art.finetune.reading import hint, nearest, no_such_file

Kind: TypeAlias = Literal["workflow", "evaluator", "trajectory_builder", "trainer_adapter", "trainer", "dataset"]

GROUP = "art.finetune"
BUILT_IN: dict[Kind, dict[str, frozenset[str]]] = {
    "workflow": {"command": frozenset({"command"})},
    "evaluator": {
        "command": frozenset({"command"}),
        "contains": frozenset({"ignore_case"}),
        "exact_match": frozenset({"ignore_case"}),
        "number_match": frozenset({"absolute", "relative"}),
        "regex_match": frozenset({"pattern"}),
        "json_match": frozenset({"schema"}),
        "judge": frozenset({"judge_model", "base_url", "api_key", "rubric", "timeout_seconds", "max_tokens"}),
        "ruler": frozenset({"judge_model", "base_url", "api_key", "rubric", "mode", "timeout_seconds", "max_tokens"}),
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
    "workflow": ("question", "messages", "row", "rollout", "llms", "seed"),
    "evaluator": ("row", "output", "trajectory"),
}
"""The arguments that a function can get, by the names of its parameters. The other kinds are classes, which are called by
position."""
FORMER_METHODS: dict[Kind, dict[str, str]] = {
    "trajectory_builder": {"start_run": "sample"},
    "trainer_adapter": {"submit": "train", "wait_until_complete": "train"},
    "trainer": {"bind_components": "__init__", "run_epoch": "run"},
}
"""Methods of NVIDIA's parts that nothing calls here, each with our method for the same work. NVIDIA's other names, such as
`finalize`, may also be a part's own helpers."""
VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
HOW_TO_NAME = "package.module:NAME or path/file.py:NAME"
Toolkit: TypeAlias = Callable[[Kind], list[str]]
"""The `_type`s of a kind that are registered with NVIDIA's toolkit."""


def check(kind: Kind, type_name: str, toolkit: Toolkit | None = None) -> None:
    """Checks that a component is known. No module is imported.

    Raises:
        ValueError: nothing has this type, with the known types; or the file does not exist.
    """
    target = _target(kind, type_name)
    if target is None and type_name not in BUILT_IN[kind] and not (toolkit and type_name in toolkit(kind)):
        raise ValueError(_unknown(kind, type_name, toolkit))
    if target is not None and target[0].endswith(".py") and not Path(target[0]).exists():
        raise no_such_file(Path(target[0]))


def load(kind: Kind, type_name: str) -> Callable[..., Any]:
    """The function or class that a known type names. Imports the module, and adds the module's folder to `sys.path`, as Python does
    for a program. Built-in workflows and evaluators are no such functions.

    Raises:
        ValueError: the module cannot be imported, has no such name, or the name is nothing that can be called; or a part has a
            method that nothing calls any more.
    """
    target = _target(kind, type_name)
    if target is None:
        raise ValueError(_unknown(kind, type_name, None))
    module, name = target
    imported = _import(module)
    loaded: Any = getattr(imported, name, None)
    if loaded is None:
        public = [known for known in vars(imported) if not known.startswith("_")]
        raise ValueError(f"{module} has no {name!r}: {hint(name, public)}")
    if not callable(loaded):
        raise ValueError(f"{type_name!r} is of type {type(loaded).__name__}: name a function or a class")
    if kind in PARAMETERS:
        _check_function(kind, name, loaded)
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


def names_of_parameters(function: Callable[..., Any]) -> set[str]:
    """The arguments that a function gets by name."""
    return {parameter.name for parameter in _parameters(function)}


def source_of(function: Callable[..., Any]) -> str:
    """The source of a function, without the functions that it calls; empty where Python has no source."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


def question_parameter(workflow: Callable[..., Any]) -> str | None:
    """The parameter that gets the question under another name: the only required parameter with a name of its own."""
    required = [parameter.name for parameter in _parameters(workflow) if parameter.default is parameter.empty]
    others = [name for name in required if name not in PARAMETERS["workflow"]]
    return others[0] if len(others) == 1 and "question" not in required else None


def is_code(kind: Kind, type_name: str) -> bool:
    """Whether a type names code that `load` imports."""
    return _target(kind, type_name) is not None


def is_of_toolkit(kind: Kind, type_name: str) -> bool:
    """Whether only NVIDIA's toolkit can know a type."""
    return type_name not in BUILT_IN[kind] and not is_code(kind, type_name)


def _target(kind: Kind, type_name: str) -> tuple[str, str] | None:
    """A module (or its file) and a name in the module: `'agent.py:answer' -> ('agent.py', 'answer')`. None: the type is a built-in
    workflow or evaluator, or names no code."""
    if type_name in BUILT_IN[kind] and type_name not in BUILT_IN_CLASSES:
        return None
    target = BUILT_IN_CLASSES.get(type_name) or (type_name if ":" in type_name else _entries().get(type_name, ""))
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
    # An entry point may name extras in brackets behind its object.
    return {entry_point.name: entry_point.value.split("[")[0].strip() for entry_point in entry_points(group=GROUP)}


def _unknown(kind: Kind, type_name: str, toolkit: Toolkit | None) -> str:
    if type_name == "dpo_traj_builder" or type_name.startswith("nemo_customizer_"):
        ours = next(iter(BUILT_IN[kind]))
        return f"DPO and NeMo Customizer are refused: use {ours}, or train chosen answers with model.train_sft"
    known = sorted({*BUILT_IN[kind], *_entries(), *(toolkit(kind) if toolkit else ())})
    near = nearest(type_name, known)
    meant = f"; did you mean {near!r}?" if near else ""
    text = f"unknown type {type_name!r}{meant}; known: {', '.join([*known, HOW_TO_NAME])}"
    if toolkit is None and kind in PARAMETERS:
        text += "; components of NVIDIA's toolkit need nvidia-nat-core and nvidia-nat-eval in this environment"
    return text


def _check_function(kind: Kind, name: str, function: Callable[..., Any]) -> None:
    """Checks that a function can be called with the arguments of a workflow or an evaluator, by the names of its parameters.

    Raises:
        ValueError: the function cannot be called.
    """
    if isinstance(function, type):
        raise ValueError(f"{name!r} is a class: the {kind} is a function, or an object that can be called")
    known, parameters = PARAMETERS[kind], _parameters(function)
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ValueError(f"{name} takes {parameter.name!r} by position only: remove the '/' from its parameters")
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    others = [parameter for parameter in required if parameter not in known]
    is_single = kind == "workflow" and question_parameter(function) is not None
    if others and not is_single:
        single = ", or a single other one that gets the question" if kind == "workflow" else ""
        raise ValueError(
            f"{name} cannot be called, because of its parameter {others[-1]!r}: the parameters of this {kind} can be "
            f"{', '.join(known)} in any selection{single}, and others with a default"
        )


def _check_methods(kind: Kind, type_name: str, part: type[Any]) -> None:
    """Checks that a part does its work in the methods of today. A part with an own method of today may have any others.

    Raises:
        ValueError: the part has a former method in place of the method of today.
    """
    for former, today in FORMER_METHODS[kind].items():
        method = getattr(part, today, None)
        is_own = method is not None and not (getattr(method, "__module__", None) or "").startswith("art.finetune.")
        if hasattr(part, former) and not is_own:
            raise ValueError(
                f"{type_name} has the method {former!r}, which nothing calls any more: override {today!r} in its place "
                "(docs/howto/finetune-parts.md)"
            )


# --- modules ------------------------------------------------------------------------------------------------------


def _import(name: str) -> ModuleType:
    """The module with a name, or the module of a file that ends in .py."""
    file = Path(name).resolve() if name.endswith(".py") else None
    folder = str(file.parent if file else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()  # a file may be new
    try:
        return _import_file(file) if file else importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of any kind: it is the user's code
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
        last = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames[-1].filename != __file__ else ""
        what = " ".join(f"{type(error).__name__}: {error}".split())
        if isinstance(error, ModuleNotFoundError):
            last += f": install it, or run the command in the folder it is in ({Path.cwd()})"
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
