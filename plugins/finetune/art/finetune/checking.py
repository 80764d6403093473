"""Checks a document as a whole: the fields, the components, the names of parts, the policy. All problems come at once.

`sections` has the rules for a single section. Rules for several sections read the plain tree, because other values in the tree
may be wrong. Nothing is asked of a server, no code of the user is imported, and no data are read.
"""

import itertools
import math
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias, cast

from pydantic import BaseModel, ValidationError

from art.finetune import components, other_harnesses
from art.finetune.components import BUILT_IN, Kind, Toolkit
from art.finetune.errors import WrongInput
from art.finetune.masking import is_secret
from art.finetune.reading import Document, KeyPath, Problem, described, dotted, hint, nearest, typed
from art.finetune.sections import TOOLKIT_SECTIONS, UNUSED, URL, BackendSection, Config, InitArgs, Training

Wrong: TypeAlias = Iterator[tuple[KeyPath, str]]
"""The paths of wrong values, each with what is wrong about the value."""

EVALUATORS: KeyPath = ("eval", "evaluators")
SECTIONS: dict[Kind, KeyPath] = {
    "evaluator": EVALUATORS,
    "trajectory_builder": ("trajectory_builders",),
    "trainer_adapter": ("trainer_adapters",),
    "trainer": ("trainers",),
}
"""The section with the components of each kind. For each of the last three kinds `finetuning` names one component, in a field
with the kind's name."""
REWARDS: tuple[KeyPath, ...] = (("finetuning", "reward_function"), ("finetuning", "validation", "reward"))
"""The reward of training, and the reward of validations."""
MISSPELT = 0.75
"""In a section that accepts unknown names, a name with this likeness to one of our fields is a misspelling. The names of NVIDIA's
fields are less like ours."""
OUR_WORDS = re.compile(r"^\w+ (?=must|is)|, (unable|got) .*| or instance of .*| for <.*| after validation")
"""The words that are left out of pydantic's messages, such as "Input" and the names of classes."""


def check(document: Document, toolkit: Toolkit | None = None) -> Config:
    """The configuration of a document.

    Raises:
        WrongInput: all problems, each with its location, in the order of the file. Problems of overrides come last.
    """
    tree, problems = document.tree, list(document.problems)
    if other_harnesses.whose(tree):
        raise WrongInput([str(Problem(document.location_of(()), (), other_harnesses.remedy(tree)))])
    config, wrong = _validated(tree)
    seen = {problem.path for problem in problems}
    rules = (_components(tree, toolkit), _misspelt(tree), _names(tree), _rulers(tree), _batches(tree), _policies(tree))
    for path, text in itertools.chain(wrong, *rules):
        if path not in seen:
            seen.add(path)
            problems.append(Problem(document.location_of(path), path, text))
    if problems or config is None:
        problems.sort(key=_order)
        raise WrongInput([str(problem) for problem in problems])
    return config


def _order(problem: Problem) -> tuple[bool, str, int, int]:
    location = problem.location
    is_override = location.line == 0
    return is_override, location.source, location.line, location.column


def without_effect(config: Config) -> list[str]:
    """The names of fields that the file sets without effect, for one line to the user."""
    is_of_toolkit = components.is_of_toolkit("workflow", config.workflow.type)
    sections = [] if is_of_toolkit else [name for name in TOOLKIT_SECTIONS if name in config.model_fields_set]
    ignored = [*sections, *(dotted(path) for path in _unused(config, ()))]
    functions = {"workflow": config.workflow} | {f"eval.evaluators.{n}": e for n, e in config.eval.evaluators.items()}
    for name, component in functions.items():
        if ":" in component.type:  # a function of the user, which gets no fields
            ignored += [f"{name}.{key}" for key in component.fields()]
    return ignored


def _unused(section: BaseModel, path: KeyPath) -> Iterator[KeyPath]:
    """The paths of fields that a section sets and that nothing reads, also in the sections inside."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if UNUSED in field.metadata:
            if name in section.model_fields_set:
                yield (*path, name)
        elif isinstance(value, Training | InitArgs):
            yield from ((*path, name, key) for key in value.model_extra or {})
        elif isinstance(value, BaseModel):
            yield from _unused(value, (*path, name))
        elif isinstance(value, dict):
            for key, entry in cast("dict[str, Any]", value).items():
                if isinstance(entry, BaseModel):
                    yield from _unused(entry, (*path, name, key))


# --- fields -------------------------------------------------------------------------------------------------------


def _validated(tree: dict[str, Any]) -> tuple[Config | None, list[tuple[KeyPath, str]]]:
    """The configuration, or pydantic's errors in our words, one for each value."""
    try:
        return Config.model_validate(tree), []
    except ValidationError as error:
        details = error.errors(include_url=False)
    by_path: dict[KeyPath, list[Any]] = {}  # Any: pydantic's dictionaries
    for detail in details:
        by_path.setdefault(_path_of(detail["loc"], tree, is_missing=detail["type"] == "missing"), []).append(detail)
    meant: set[KeyPath] = set()
    wrong: list[tuple[KeyPath, str]] = []
    for path, errors in by_path.items():
        if errors[0]["type"] == "extra_forbidden":
            names = _keys_of(path[:-1])
            wrong.append((path, f"unknown key: {_meant(str(path[-1]), names)}"))
            # A misspelt key is one problem: the right key is not reported as missing too.
            meant.add((*path[:-1], nearest(str(path[-1]), names) or ""))
        # For a union with a list, the error inside the list says more than the errors about the other types of the union.
        elif not any(inner != path and inner[: len(path)] == path for inner in by_path):
            wrong.append((path, _sentence(path, errors)))
    return None, [(path, text) for path, text in wrong if path not in meant]


def _meant(key: str, names: list[str]) -> str:
    """The end of a sentence about an unknown key: where another harness's name is in our file, or the nearest of the names."""
    elsewhere = other_harnesses.FILE_NAMES.get(key)
    return f"here it is {elsewhere}" if elsewhere else hint(key, names)


def _path_of(loc: tuple[str | int, ...], tree: Any, *, is_missing: bool) -> KeyPath:
    """The path of an error in the tree. Pydantic's `loc` can also have names of a union's members, which the tree lacks:
    `("dataset", "DatasetSection", "file_path") -> ("dataset", "file_path")`."""
    path: KeyPath = ()
    for part in loc[:-1] if is_missing else loc:
        try:
            tree = tree[part]
        except (LookupError, TypeError):
            continue
        path = (*path, part)
    return (*path, loc[-1]) if is_missing else path


def _sentence(path: KeyPath, errors: list[Any]) -> str:
    """One sentence about a value. For a union, pydantic has an error for each type."""
    first = errors[0]
    if first["type"] == "missing":
        return "is missing: add it (docs/finetune.md has all fields)"
    if first["type"] == "string_pattern_mismatch" and first["ctx"]["pattern"] == URL:
        return f"must begin with http:// or https://, not {described(first['input'])}"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    wanted = dict.fromkeys(
        OUR_WORDS.sub("", detail["msg"].replace("should", "must").replace("valid dictionary", "section"))
        for detail in errors
    )
    sentence, value = " or ".join(wanted), first["input"]
    if is_secret(str(path[-1])) or isinstance(value, list | dict):
        return sentence
    return f"{sentence}, not {described(value)}"


def _keys_of(path: KeyPath) -> list[str]:
    """The keys that a section can have."""
    schema = Config.model_json_schema()
    section = schema
    for part in path:
        inner: dict[str, Any] = section.get("properties", {}).get(part) or section["additionalProperties"]
        references = [option["$ref"] for option in (inner, *inner.get("anyOf", ())) if "$ref" in option]
        section = schema["$defs"][references[0].rpartition("/")[2]] if references else inner
    return list(section["properties"])


# --- rules for several sections -----------------------------------------------------------------------------------


def _at(tree: Any, path: KeyPath) -> Any:
    """The value at a path; None without such a value."""
    for part in path:
        tree = cast("Mapping[Any, Any]", tree).get(part) if isinstance(tree, Mapping) else None
    return tree


def _section(tree: Any, *path: str | int) -> Mapping[str, Any]:
    """The section at a path; empty if the section is missing or the value is no section."""
    section = _at(tree, path)
    return cast("Mapping[str, Any]", section) if isinstance(section, Mapping) else {}


def _components(tree: Any, toolkit: Toolkit | None) -> Wrong:
    """Wrong types of the parts that the harness makes, and wrong fields of built-in parts."""
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
        if kind == "evaluator" and name in ("judge", "ruler") and "timeout_seconds" in fields:
            seconds = typed(fields["timeout_seconds"])
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
                yield (*path, "timeout_seconds"), f"must be a number of seconds above 0, not {described(seconds)}"
        if kind == "evaluator" and name in ("judge", "ruler") and "max_tokens" in fields:
            number = typed(fields["max_tokens"])
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                yield (*path, "max_tokens"), f"must be a number of tokens above 0, not {described(number)}"
        if name == "command" and name in BUILT_IN[kind]:
            yield from _command((*path, "command"), fields.get("command"))
            if kind == "workflow" and _at(tree, ("finetuning", "target_functions")) not in (None, ["<workflow>"]):
                text = 'a command has no functions inside of it: leave this out, or write ["<workflow>"]'
                yield ("finetuning", "target_functions"), text


def _command(path: KeyPath, command: Any) -> Wrong:
    words: list[Any] = cast("list[Any]", command) if isinstance(command, list) else []
    if isinstance(command, str):
        try:
            words = list[Any](shlex.split(command))
        except ValueError as error:
            yield path, f"cannot be split into words: {error}; write a list of texts"
            return
    if not words or not all(isinstance(word, str) for word in words):
        yield path, f"must be a command line, or a list of texts, not {described(command)}"
    elif shutil.which(words[0]) is None:
        yield path, f"there is no program {words[0]!r} here or in PATH: install it, or write its path"


def _misspelt(tree: Any) -> Wrong:
    """Misspelt names of our fields, and names of other harnesses, in sections that accept all fields of the toolkit."""
    for name in _section(tree, "trainer_adapters"):
        for section, model in (("training",), Training), (("backend", "init_args"), InitArgs):
            path = ("trainer_adapters", name, *section)
            for key in _section(tree, *path):
                near = nearest(key, model.model_fields, MISSPELT)
                known = {*model.model_fields, *other_harnesses.WITHOUT_EFFECT}
                elsewhere = other_harnesses.of_training(key) if model is Training and key not in known else None
                if elsewhere:
                    yield (*path, key), f"unknown key: here it is {elsewhere}"
                elif near not in (None, key):
                    yield (*path, key), f"unknown key: did you mean {near!r}?"


def _names(tree: Any) -> Wrong:
    """Names in `finetuning` of parts that the file lacks."""
    kinds: tuple[Kind, ...] = ("trainer", "trajectory_builder", "trainer_adapter")
    named = [(("finetuning", kind), _at(tree, ("finetuning", kind)), SECTIONS[kind]) for kind in kinds]
    for reward in REWARDS:
        named += [(path, name, EVALUATORS) for path, name in _evaluators(tree, reward)]
    for path, name, section in named:
        known = _section(tree, *section)
        if isinstance(name, str) and name not in known:
            yield path, f"{dotted(section)} has no {name!r}: {hint(name, known)}"


def _evaluators(tree: Any, reward: KeyPath) -> list[tuple[KeyPath, str]]:
    """The evaluators that a reward names, each behind the path of its name."""
    evaluators = [((*reward, "weights", name), name) for name in _section(tree, *reward, "weights")]
    single = _at(tree, (*reward, "name"))
    if isinstance(single, str):
        return [((*reward, "name"), single), *evaluators]
    return evaluators


def _rulers(tree: Any) -> Wrong:
    """Rulers without a group to compare: in a validation, or with a single rollout of each row."""
    rulers = [name for name in _section(tree, *EVALUATORS) if _at(tree, (*EVALUATORS, name, "_type")) == "ruler"]

    def rulers_of(reward: KeyPath) -> list[str]:
        return [name for _, name in _evaluators(tree, reward) if name in rulers]

    training, validation = map(rulers_of, REWARDS)
    if _at(tree, REWARDS[1]) is None and _has_validations(tree):
        validation = training
    if validation:
        text = f"{validation[0]!r} is a ruler, which compares the rollouts of a group: name another evaluator here"
        yield REWARDS[1], text
    builder = ("trajectory_builders", str(_at(tree, ("finetuning", "trajectory_builder"))), "num_generations")
    if training and _at(tree, builder) == 1:
        yield builder, f"must be at least 2: {training[0]!r} is a ruler, which compares the rollouts of a row"


def _batches(tree: Any) -> Wrong:
    """Fields that exclude `rows_per_step` or `sample_ahead`; and a patience without validations."""
    finetuning = _section(tree, "finetuning")
    rank = ("curriculum_learning", "rank")
    if finetuning.get("rows_per_step") is not None and _at(finetuning, rank) == "on_expansion":
        yield ("finetuning", *rank), "on_expansion is of whole epochs: leave rows_per_step out, or write every_epoch"
    elif finetuning.get("sample_ahead") is True and _at(finetuning, rank) == "on_expansion":
        yield ("finetuning", *rank), "on_expansion decides the next rows after a step: leave sample_ahead out"
    patience = ("validation", "patience")
    if _at(finetuning, patience) is not None and not _has_validations(tree):
        yield ("finetuning", *patience), "needs validations: add finetuning.validation.dataset or share"


def _has_validations(tree: Any) -> bool:
    section = _section(tree, "finetuning", "validation")
    return section.get("dataset") is not None or section.get("share") is not None


# --- the policy ---------------------------------------------------------------------------------------------------


def policy_llm(tree: Any) -> str | None:
    """The key of the policy in `llms`; None if `llms` is empty.

    The policy is the entry that `target_model` names by key or by model name. Without `target_model` the policy is the only
    entry, or the only entry with the name of the trained model or of its base model.

    Raises:
        ValueError: no entry or several entries match; the message names them.
    """
    finetuning = _section(tree, "finetuning")
    models: dict[str, Any] = {}  # Any: a wrong name too
    for key, llm in _section(tree, "llms").items():
        models[key] = _at(llm, ("model_name",)) or _at(llm, ("model",))
    target = finetuning.get("target_model")
    if target is not None:
        matches = [target] if target in models else [key for key, model in models.items() if model == target]
        if len(matches) > 1:
            raise ValueError(f"{' and '.join(matches)} have the model_name {target!r}: name one by its key")
        if not matches:
            known = [*models, *(model for model in models.values() if isinstance(model, str))]
            raise ValueError(f"no entry of llms has the name or the model_name {target!r}: {hint(target, known)}")
        return matches[0]
    if len(models) < 2:
        return next(iter(models), None)
    defaults = {name: field.default for name, field in BackendSection.model_fields.items()}
    backend = defaults | dict(_section(tree, "trainer_adapters", str(finetuning.get("trainer_adapter")), "backend"))
    name, project, base_model = backend["name"], backend["project"], backend["base_model"]
    matches = [key for key, model in models.items() if model in (name, f"{project}/{name}", base_model)]
    if len(matches) != 1:
        which = f"{' and '.join(matches)} could both be" if matches else f"none of {', '.join(models)} is"
        raise ValueError(
            f"{which} the model that is trained (model_name {name!r} or {base_model!r}): set finetuning.target_model to the key "
            "of its entry in llms"
        )
    return matches[0]


def _policies(tree: Any) -> Wrong:
    """A policy that is not exactly one entry of `llms`."""
    target, name = (_at(tree, ("finetuning", field)) for field in ("target_model", "trainer_adapter"))
    if not isinstance(target, str | None) or not _section(tree, "trainer_adapters", str(name)):
        return  # a problem of another rule
    try:
        policy_llm(tree)
    except ValueError as error:
        yield ("finetuning", "target_model"), str(error)
