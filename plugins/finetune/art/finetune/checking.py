"""Checks a document as a whole: its fields, the components, the names of its parts, the policy. All problems come at once.

`sections` has the rules for one section. Rules for several read the plain tree, because other values of it may be wrong.
Nothing is asked of a server, no user's module is imported, and no data are read.
"""

import itertools
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias, cast

from pydantic import BaseModel, ValidationError

from art.finetune import components
from art.finetune.components import BUILT_IN, Kind, Toolkit
from art.finetune.errors import WrongInput
from art.finetune.masking import is_secret
from art.finetune.reading import Document, KeyPath, Problem, described, dotted, hint, nearest
from art.finetune.sections import TOOLKIT_SECTIONS, UNUSED, Backend, Config, InitArgs, Training

Wrong: TypeAlias = Iterator[tuple[KeyPath, str]]
"""Values with what is wrong about them."""

EVALUATORS: KeyPath = ("eval", "evaluators")
SECTIONS: dict[Kind, KeyPath] = {
    "evaluator": EVALUATORS,
    "trajectory_builder": ("trajectory_builders",),
    "trainer_adapter": ("trainer_adapters",),
    "trainer": ("trainers",),
}
"""Where the components of a kind are. `finetuning` names one of each of the last three, in a field with the kind's name."""
REWARDS: tuple[KeyPath, ...] = (("finetuning", "reward_function"), ("finetuning", "validation", "reward"))
MISSPELT = 0.75
"""The likeness of a name to the right one where unknown names are accepted. That of NVIDIA's fields to ours is less."""
OUR_WORDS = re.compile(r"^\w+ (?=must|is)|, (unable|got) .*| or instance of .*| for <.*| after validation")
"""What is left out of pydantic's messages, such as "Input" and the names of classes."""


def check(document: Document, toolkit: Toolkit | None = None) -> Config:
    """The configuration of a document.

    Raises:
        WrongInput: all problems, each with its place, in the order of the file; those of overrides last.
    """
    tree, problems = document.tree, list(document.problems)
    config, wrong = _validated(tree)
    seen = {each.path for each in problems}
    rules = (_components(tree, toolkit), _misspelt(tree), _names(tree), _rulers(tree), _policy(tree))
    for path, text in itertools.chain(wrong, *rules):
        if path not in seen:
            seen.add(path)
            problems.append(Problem(document.place_of(path), path, text))
    if problems or config is None:
        problems.sort(key=lambda each: (not each.place.line, each.place.source, each.place.line, each.place.column))
        raise WrongInput([str(each) for each in problems])
    return config


def policy_llm(config: Config) -> str | None:
    """The entry of `llms` that the policy stands for: the one that `target_model` names by key or model name, else the only
    one with the name of the run or of its base model, else the only one at all. None: there are no entries.

    Raises:
        ValueError: it is not one entry; the message names them.
    """
    models = {key: llm.model_name for key, llm in config.llms.items()}
    return _choose(models, config.finetuning.target_model, config.adapter.backend.model_dump())


def without_effect(config: Config) -> list[str]:
    """The fields that the file sets and that have no effect here, for one line to the user."""
    is_of_toolkit = components.is_of_toolkit("workflow", config.workflow.type)
    sections = [] if is_of_toolkit else [name for name in TOOLKIT_SECTIONS if name in config.model_fields_set]
    found = [*sections, *(dotted(path) for path in _unused(config, ()))]
    functions = {"workflow": config.workflow} | {f"eval.evaluators.{n}": e for n, e in config.eval.evaluators.items()}
    for name, component in functions.items():
        if ":" in component.type:
            found += [f"{name}.{key}" for key in component.fields()]
    return found


def _unused(section: BaseModel, path: KeyPath) -> Iterator[KeyPath]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if UNUSED in field.metadata:
            if name in section.model_fields_set:
                yield (*path, name)
        elif isinstance(value, Training):
            yield from ((*path, name, key) for key in value.model_extra or {})
        elif isinstance(value, BaseModel):
            yield from _unused(value, (*path, name))
        elif isinstance(value, dict):
            for key, each in cast("dict[str, Any]", value).items():
                if isinstance(each, BaseModel):
                    yield from _unused(each, (*path, name, key))


# --- fields -------------------------------------------------------------------------------------------------------


def _validated(tree: dict[str, Any]) -> tuple[Config | None, list[tuple[KeyPath, str]]]:
    """The configuration, or pydantic's errors in our words, one for each value."""
    try:
        return Config.model_validate(tree), []
    except ValidationError as error:
        found = error.errors(include_url=False)
    by_path: dict[KeyPath, list[Any]] = {}  # Any: pydantic's dictionaries
    for each in found:
        by_path.setdefault(_path_of(each["loc"], tree, is_missing=each["type"] == "missing"), []).append(each)
    meant: set[KeyPath] = set()
    wrong: list[tuple[KeyPath, str]] = []
    for path, errors in by_path.items():
        if errors[0]["type"] == "extra_forbidden":
            names = _keys_of(path[:-1])
            wrong.append((path, f"unknown key: {hint(str(path[-1]), names)}"))
            meant.add((*path[:-1], nearest(str(path[-1]), names) or ""))
        # Of a union that has a list, the error inside of it says more than that it is of no other type.
        elif not any(each[: len(path)] == path != each for each in by_path):
            wrong.append((path, _sentence(path, errors)))
    return None, [(path, text) for path, text in wrong if path not in meant]


def _path_of(loc: tuple[str | int, ...], tree: Any, *, is_missing: bool) -> KeyPath:
    """An error's place in the tree. Pydantic also puts the names of a union's members into it."""
    path: KeyPath = ()
    for part in loc[:-1] if is_missing else loc:
        try:
            tree = tree[part]
        except (LookupError, TypeError):
            continue
        path = (*path, part)
    return (*path, loc[-1]) if is_missing else path


def _sentence(path: KeyPath, errors: list[Any]) -> str:
    """One sentence for a value, of which pydantic may have tried several types."""
    first = errors[0]
    if first["type"] == "missing":
        return "is missing: add it (docs/finetune.md has all fields)"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    wanted = dict.fromkeys(
        OUR_WORDS.sub("", each["msg"].replace("should", "must").replace("valid dictionary", "section"))
        for each in errors
    )
    value = first["input"]
    given = "" if is_secret(str(path[-1])) or isinstance(value, list | dict) else f", not {described(value)}"
    return f"{' or '.join(wanted)}{given}"


def _keys_of(path: KeyPath) -> list[str]:
    """The keys that a section can have."""
    schema = Config.model_json_schema()
    found = schema
    for part in path:
        inner: dict[str, Any] = found.get("properties", {}).get(part) or found["additionalProperties"]
        references = [each["$ref"] for each in (inner, *inner.get("anyOf", ())) if "$ref" in each]
        found = schema["$defs"][references[0].rpartition("/")[2]] if references else inner
    return list(found["properties"])


# --- rules for several sections -----------------------------------------------------------------------------------


def _at(tree: Any, path: KeyPath) -> Any:
    """A value; None: there is none."""
    for part in path:
        tree = cast("Mapping[Any, Any]", tree).get(part) if isinstance(tree, Mapping) else None
    return tree


def _section(tree: Any, *path: str | int) -> Mapping[str, Any]:
    """A section; it is empty if it is missing, or something else."""
    found = _at(tree, path)
    return cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else {}


def _components(tree: Any, toolkit: Toolkit | None) -> Wrong:
    """The types of the parts that the harness makes, and the fields of those that are built in."""
    parts: list[tuple[Kind, KeyPath]] = [("workflow", ("workflow",))]
    for kind, section in SECTIONS.items():
        for name in _section(tree, *section):
            parts.append((kind, (*section, name)))
    for kind, path in parts:
        fields = dict(_section(tree, *path))
        name = fields.pop("_type", None)
        if not isinstance(name, str) or not name:
            continue
        try:
            components.check(kind, name, toolkit)
        except ValueError as error:
            yield (*path, "_type"), str(error)
        if name in BUILT_IN[kind]:
            known = sorted(BUILT_IN[kind][name])
            yield from (((*path, key), f"unknown key: {hint(key, known)}") for key in fields if key not in known)
        if (kind, name) == ("workflow", "command"):
            yield from _command(fields.get("command"))
            if _at(tree, ("finetuning", "target_functions")) not in (None, ["<workflow>"]):
                text = 'a command has no functions inside of it: leave this out, or write ["<workflow>"]'
                yield ("finetuning", "target_functions"), text


def _command(command: Any) -> Wrong:
    path: KeyPath = ("workflow", "command")
    words: list[Any] = cast("list[Any]", command) if isinstance(command, list) else []
    if isinstance(command, str):
        try:
            words = list[Any](shlex.split(command))
        except ValueError as error:
            yield path, f"cannot be split into words: {error}; write a list of texts"
            return
    if not words or not all(isinstance(each, str) for each in words):
        yield path, f"must be a command line, or a list of texts, not {described(command)}"
    elif shutil.which(words[0]) is None:
        yield path, f"there is no program {words[0]!r} here or in PATH: install it, or write its path"


def _misspelt(tree: Any) -> Wrong:
    """Fields that are nearly ours, in sections that accept all fields of the toolkit."""
    for name in _section(tree, "trainer_adapters"):
        for section, model in (("training",), Training), (("backend", "init_args"), InitArgs):
            path = ("trainer_adapters", name, *section)
            for key in _section(tree, *path):
                near = nearest(key, model.model_fields, MISSPELT)
                if near not in (None, key):
                    yield (*path, key), f"unknown key: did you mean {near!r}?"


def _names(tree: Any) -> Wrong:
    """The parts that `finetuning` names."""
    kinds: tuple[Kind, ...] = ("trainer", "trajectory_builder", "trainer_adapter")
    named = [(("finetuning", kind), _at(tree, ("finetuning", kind)), SECTIONS[kind]) for kind in kinds]
    for reward in REWARDS:
        named += [(path, name, EVALUATORS) for path, name in _evaluators(tree, reward)]
    for path, name, section in named:
        known = _section(tree, *section)
        if isinstance(name, str) and name not in known:
            yield path, f"{dotted(section)} has no {name!r}: {hint(name, known)}"


def _evaluators(tree: Any, reward: KeyPath) -> list[tuple[KeyPath, str]]:
    """The evaluators that a reward names."""
    name = _at(tree, (*reward, "name"))
    weights = [((*reward, "weights", each), each) for each in _section(tree, *reward, "weights")]
    return [*([((*reward, "name"), name)] if isinstance(name, str) else []), *weights]


def _rulers(tree: Any) -> Wrong:
    """A ruler compares the rollouts of a group, which neither a validation nor a single rollout has."""
    rulers = [name for name in _section(tree, *EVALUATORS) if _at(tree, (*EVALUATORS, name, "_type")) == "ruler"]
    training, validation = ([name for _, name in _evaluators(tree, each) if name in rulers] for each in REWARDS)
    if _at(tree, REWARDS[1]) is None and _at(tree, ("finetuning", "validation", "dataset")) is not None:
        validation = training
    if validation:
        text = f"{validation[0]!r} is a ruler, which compares the rollouts of a group: name another evaluator here"
        yield REWARDS[1], text
    builder = ("trajectory_builders", str(_at(tree, ("finetuning", "trajectory_builder"))), "num_generations")
    if training and _at(tree, builder) == 1:
        yield builder, f"must be at least 2: {training[0]!r} is a ruler, which compares the rollouts of a row"


# --- the policy ---------------------------------------------------------------------------------------------------


def _policy(tree: Any) -> Wrong:
    finetuning = _section(tree, "finetuning")
    adapter = _section(tree, "trainer_adapters", str(finetuning.get("trainer_adapter")))
    target = finetuning.get("target_model")
    if not adapter or not isinstance(target, str | None):
        return
    models: dict[str, str | None] = {}
    for key, llm in _section(tree, "llms").items():
        model = _at(llm, ("model_name",)) or _at(llm, ("model",))
        models[key] = model if isinstance(model, str) else None
    defaults = {name: field.default for name, field in Backend.model_fields.items()}
    try:
        _choose(models, target, {**defaults, **_section(adapter, "backend")})
    except ValueError as error:
        yield ("finetuning", "target_model"), str(error)


def _choose(models: Mapping[str, str | None], target: str | None, backend: Mapping[str, Any]) -> str | None:
    if target is not None:
        found = [target] if target in models else [key for key, model in models.items() if model == target]
        if len(found) > 1:
            raise ValueError(f"{' and '.join(found)} have the model_name {target!r}: name one by its key")
        if not found:
            known = [*models, *filter(None, models.values())]
            raise ValueError(f"no entry of llms has the name or the model_name {target!r}: {hint(target, known)}")
        return found[0]
    if len(models) < 2:
        return next(iter(models), None)
    name, project, base_model = backend["name"], backend["project"], backend["base_model"]
    found = [key for key, model in models.items() if model in (name, f"{project}/{name}", base_model)]
    if len(found) != 1:
        which = f"{' and '.join(found)} could both be" if found else f"none of {', '.join(models)} is"
        raise ValueError(
            f"{which} the model that is trained (model_name {name!r} or {base_model!r}): set finetuning.target_model to the key "
            "of its entry in llms"
        )
    return found[0]
