"""Checks a document as a whole: its fields, the names of its parts, the components, the policy. All problems come at once.

Nothing is asked of a server, no user's module is imported, and no data are read.
"""

import functools
import shlex
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

import art
from art.finetune import components
from art.finetune.components import BUILT_IN, Kind, Toolkit
from art.finetune.errors import WrongInput
from art.finetune.reading import Document, KeyPath, Problem, described, dotted, hint, nearest
from art.finetune.sections import TOOLKIT_SECTIONS, Backend, Component, Config, Dataset, RewardFunction

UNKNOWN = "?"
"""Stands for a `_type` that the file does not have, so that the rest of the file can be checked."""
ROUNDS = 10
"""Each removes what is wrong, which can show what was hidden behind it."""
STUBS: dict[KeyPath, dict[str, str]] = {("workflow",): {"_type": UNKNOWN}, ("eval",): {}, ("finetuning",): {}}
EVALUATORS: KeyPath = ("eval", "evaluators")
ALMOST = 0.9
"""The likeness of a misspelt name to the right one, where unknown names are accepted."""
SECRETS = ("api_key", "token", "password")
DPO = (
    "DPO and NeMo Customizer are refused: they train on pairs, here rewards train the policy; use {}, "
    "or train chosen answers with model.train_sft"
)
NO_S3 = "data are not read from or written to S3: use files on this machine"
NOTHING: dict[str, Any] = {}
DATASET_TYPES = ("json", "jsonl", "csv", "parquet", "custom")
DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet")

TRAINER_ARGS = """
accelerator_config adafactor adam_beta1 adam_beta2 adam_epsilon auto_find_batch_size
average_tokens_across_devices batch_eval_metrics bf16 bf16_full_eval data_seed dataloader_drop_last
dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor ddp_backend
ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_timeout debug deepspeed disable_tqdm do_eval
do_predict do_train ds3_gather_for_generation eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start
eval_steps eval_strategy eval_use_gather_object fp16 fp16_backend fp16_full_eval fp16_opt_level fsdp fsdp_config
fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap full_determinism gradient_accumulation_steps
gradient_checkpointing gradient_checkpointing_kwargs greater_is_better group_by_length half_precision_backend
hub_always_push hub_model_id hub_private_repo hub_strategy hub_token ignore_data_skip include_for_metrics
include_inputs_for_metrics include_num_input_tokens_seen include_tokens_per_second jit_mode_eval label_names
label_smoothing_factor length_column_name load_best_model_at_end local_rank log_completions log_level
log_level_replica log_on_each_node logging_dir logging_first_step logging_nan_inf_filter logging_steps
logging_strategy lr_scheduler_kwargs lr_scheduler_type max_completion_length max_prompt_length max_steps
metric_for_best_model model_init_kwargs mp_parameters neftune_noise_alpha no_cuda num_generations num_train_epochs
optim optim_args optim_target_modules output_dir overwrite_output_dir past_index per_device_eval_batch_size
per_device_train_batch_size per_gpu_eval_batch_size per_gpu_train_batch_size prediction_loss_only push_to_hub
push_to_hub_model_id push_to_hub_organization push_to_hub_token ray_scope ref_model_mixup_alpha ref_model_sync_steps
remove_unused_columns report_to restore_callback_states_from_checkpoint resume_from_checkpoint reward_weights
run_name save_on_each_node save_only_model save_safetensors save_steps save_strategy save_total_limit seed
skip_memory_metrics sync_ref_model temperature tf32 torch_compile torch_compile_backend torch_compile_mode
torch_empty_cache_steps torchdynamo tpu_metrics_debug tpu_num_cores use_cpu use_ipex use_legacy_prediction_loop
use_liger_kernel use_mps_device warmup_ratio weight_decay"""
"""Fields of `training` that the toolkit knows, and that have no effect here. Source: `TrainerArgs` of openpipe-art 0.5."""
INIT_ARGS = """
device_map disable_log_stats dtype enable_prefix_caching fast_inference fix_tokenizer float8_kv_cache
full_finetuning gpu_memory_utilization load_in_16bit load_in_4bit load_in_8bit max_lora_rank model_name random_state
resize_model_vocab revision rope_scaling token trust_remote_code use_async use_exact_model_name
use_gradient_checkpointing"""
"""Fields of `backend.init_args` without effect. Source: `InitArgs` of openpipe-art 0.5."""


class InitArgs(BaseModel):
    """The fields of `backend.init_args` with an effect."""

    model_config = ConfigDict(extra="allow")

    max_seq_length: int | None = Field(default=None, ge=1)


class EngineArgs(BaseModel):
    """Fields of `backend.engine_args`. The server knows the others, and reports those without effect."""

    model_config = ConfigDict(extra="allow")

    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    tensor_parallel_size: int | None = Field(default=None, ge=1)
    pipeline_parallel_size: int | None = Field(default=None, ge=1)
    max_num_seqs: int | None = Field(default=None, ge=1)
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    max_model_len: int | None = Field(default=None, ge=1)
    max_logprobs: int | None = None
    enforce_eager: bool | None = None
    enable_prefix_caching: bool | None = None
    block_size: int | None = Field(default=None, ge=1)


@dataclass(frozen=True, slots=True)
class Parts:
    """One of the three sections whose entries `finetuning` names."""

    section: str
    kind: Kind
    """Also the name of the field of `finetuning`."""
    entries: Mapping[str, Component]
    chosen: str | None


def check(document: Document, toolkit: Toolkit | None = None) -> Config:
    """The configuration of a document.

    Raises:
        WrongInput: all problems, each with its place.
    """
    problems = _Found(document)
    config = _validate(document.tree, problems) if document.is_readable else None
    if config is not None:
        _check_refused(config, problems)
        _check_names(config, problems)
        _check_rewards(config, problems)
        _check_datasets(config, problems)
        _check_components(config, toolkit, problems)
        for name, adapter in config.trainer_adapters.items():
            _check_adapter(("trainer_adapters", name), adapter.backend, adapter.training, problems)
        _check_policy(config, problems)
    if problems.found or config is None:
        raise WrongInput(problems.sentences())
    return config


def policy_llm(config: Config) -> str | None:
    """The entry of `llms` that the policy stands for: the one that `target_model` names by key or model name, else the only
    one with the name of the run or of its base model, else the only one at all. None: there are no entries.

    Raises:
        ValueError: it is not one entry; the message names them.
    """
    wanted, llms = config.finetuning.target_model, config.llms
    if wanted is not None:
        found = [wanted] if wanted in llms else [key for key, llm in llms.items() if llm.model_name == wanted]
        if not found:
            known = [*llms, *(llm.model_name for llm in llms.values() if llm.model_name)]
            raise ValueError(f"no entry of llms has the name or the model_name {wanted!r}: {hint(wanted, known)}")
        if len(found) > 1:
            raise ValueError(
                f"the entries {', '.join(found)} of llms have the model_name {wanted!r}: name one by its key"
            )
        return found[0]
    if len(llms) < 2:
        return next(iter(llms), None)
    backend = config.adapter.backend
    names = {backend.name, f"{backend.project}/{backend.name}", backend.base_model}
    found = [key for key, llm in llms.items() if llm.model_name in names]
    if len(found) == 1:
        return found[0]
    which = f"{' and '.join(found)} could both be" if found else f"none of {', '.join(llms)} is"
    raise ValueError(
        f"{which} the model that is trained (model_name {backend.name!r} or {backend.base_model!r}): set "
        "finetuning.target_model to the key of its entry in llms"
    )


def without_effect(config: Config) -> list[str]:
    """The fields that the file sets and that have no effect here, for one line to the user."""
    general, backend = config.eval.general, config.adapter.backend
    fields = [
        *_set(
            general,
            "eval.general",
            ("workflow_alias", "output", "profiler", "validate_llm_endpoints", "per_input_user_id"),
        ),
        *_set(config.finetuning, "finetuning", ("run_configuration",)),
    ]
    if general.dataset is not None:
        names = ("generated_answer_key", "trajectory_key", "expected_trajectory_key")
        fields += _set(general.dataset.structure, "eval.general.dataset.structure", names)
    for parts in _parts(config):
        fields += _set(parts.entries[parts.chosen or ""], f"{parts.section}.{parts.chosen}", ("reward",))
    adapter = f"trainer_adapters.{config.finetuning.trainer_adapter}"
    fields += _set(backend, f"{adapter}.backend", ("server_config",))
    fields += [f"{adapter}.backend.init_args.{key}" for key in backend.init_args or {} if key in INIT_ARGS.split()]
    known = art.TrainConfig.model_fields
    fields += [f"{adapter}.training.{key}" for key in config.adapter.training if key not in known]
    if not components.is_of_toolkit("workflow", config.workflow.type):
        fields += [name for name in TOOLKIT_SECTIONS if name in config.model_fields_set]
    for path, kind, component in _components(config):
        if kind in ("workflow", "evaluator") and _is_code(kind, component.type):
            fields += [f"{dotted(path)}.{key}" for key in component.fields()]
    return fields


def _parts(config: Config) -> list[Parts]:
    finetuning = config.finetuning
    return [
        Parts("trainers", "trainer", config.trainers, finetuning.trainer),
        Parts("trajectory_builders", "trajectory_builder", config.trajectory_builders, finetuning.trajectory_builder),
        Parts("trainer_adapters", "trainer_adapter", config.trainer_adapters, finetuning.trainer_adapter),
    ]


def _set(section: BaseModel, path: str, names: Sequence[str]) -> list[str]:
    return [f"{path}.{name}" for name in names if name in section.model_fields_set]


# --- problems -----------------------------------------------------------------------------------------------------


class _Found:
    """The problems of a document. A value has one problem at most, and none if its section has one."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self.found: list[Problem] = list(document.problems)
        self._paths: set[KeyPath] = {each.path for each in document.problems if each.path}

    def add(self, path: KeyPath, text: str) -> None:
        if not self.has(path):
            self.found.append(Problem(self._document.place_of(path), path, text))
            self._paths.add(path)

    def silence(self, path: KeyPath) -> None:
        """Leaves out later problems of a value."""
        self._paths.add(path)

    def has(self, path: KeyPath) -> bool:
        return any(path[:length] in self._paths for length in range(1, len(path) + 1))

    def touches(self, path: KeyPath) -> bool:
        """Whether a value or a part of it has a problem."""
        return self.has(path) or any(each[: len(path)] == path for each in self._paths)

    def sentences(self) -> list[str]:
        """In the order of the file, those of overrides last."""
        ordered = sorted(
            self.found, key=lambda each: (not each.place.line, each.place.source, each.place.line, each.place.column)
        )
        return [str(each) for each in ordered]


# --- fields -------------------------------------------------------------------------------------------------------


def _validate(tree: dict[str, Any], problems: _Found) -> Config | None:
    """The configuration, without the values that are wrong. None: too much is."""
    given = tree
    for _ in range(ROUNDS):
        try:
            return Config.model_validate(given)
        except ValidationError as error:
            wrong = _translate(error, given, (), problems, Config)
        for path in wrong:
            given = _without(given, path)
            if path[-2:] == ("dataset", "_type"):
                problems.silence(path[:-1])
    return None


def _translate(
    error: ValidationError, tree: Any, prefix: KeyPath, problems: _Found, model: type[BaseModel]
) -> list[KeyPath]:
    """Adds pydantic's errors in our words, one for each value, and returns the paths inside of the tree."""
    by_path: dict[KeyPath, list[Any]] = {}  # Any: pydantic's dictionaries
    for each in error.errors(include_url=False):
        by_path.setdefault(_path_of(each["loc"], tree, is_missing=each["type"] == "missing"), []).append(each)
    # Of a union that has a list or a section, the error inside of that says more than that it is of no other type.
    by_path = {path: errors for path, errors in by_path.items() if not any(_is_inside(each, path) for each in by_path)}
    # Unknown keys first: the key that one of them was meant for is not also missing.
    for path, errors in sorted(by_path.items(), key=lambda each: each[1][0]["type"] != "extra_forbidden"):
        first = errors[0]
        if first["type"] == "missing":
            problems.add((*prefix, *path), _missing(path))
        elif first["type"] == "extra_forbidden":
            names = _names(model, path[:-1])
            problems.add((*prefix, *path), f"unknown key: {hint(str(path[-1]), names)}")
            near = nearest(str(path[-1]), names)
            if near is not None and near not in _value_at(tree, path[:-1]):
                problems.silence((*prefix, *path[:-1], near))
        else:
            problems.add((*prefix, *path), _sentence(path, errors, _value_at(tree, path)))
    return list(by_path)


def _is_inside(path: KeyPath, section: KeyPath) -> bool:
    return len(path) > len(section) and path[: len(section)] == section


def _path_of(loc: tuple[str | int, ...], tree: Any, *, is_missing: bool) -> KeyPath:
    """An error's place in the tree. Pydantic also puts the names of a union's members into it."""
    path: KeyPath = ()
    value = tree
    for part in loc[:-1] if is_missing else loc:
        if isinstance(value, Mapping) and part in value:
            path, value = (*path, part), cast("Mapping[Any, Any]", value)[part]
        elif isinstance(value, list) and isinstance(part, int) and part < len(cast("list[Any]", value)):
            path, value = (*path, part), cast("list[Any]", value)[part]
    return (*path, loc[-1]) if is_missing else path


def _value_at(tree: Any, path: KeyPath) -> Any:
    value = tree
    for part in path:
        value = value[part]
    return value


def _without(tree: dict[str, Any], path: KeyPath) -> dict[str, Any]:
    """A copy without a value. What must be there is replaced."""
    for number, part in enumerate(path):
        if isinstance(part, int):  # the list, so that the numbers of its other values stay
            path = path[:number]
            break
    if path in STUBS:
        return {**tree, str(path[0]): STUBS[path]}
    if len(path) > 1 and path[-1] == "_type":
        if path[-2] == "dataset":
            return _without(tree, path[:-1])
        return _with(tree, path, UNKNOWN)
    return _with(tree, path, None, is_removed=True)


def _with(tree: Any, path: KeyPath, value: Any, *, is_removed: bool = False) -> Any:
    copy = dict(cast("Mapping[Any, Any]", tree)) if isinstance(tree, Mapping) else {}
    first, rest = next(iter(path)), path[1:]
    if rest:
        copy[first] = _with(copy.get(first), rest, value, is_removed=is_removed)
    elif is_removed:
        copy.pop(first, None)
    else:
        copy[first] = value
    return copy


@functools.cache
def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema(by_alias=True)


def _names(model: type[BaseModel], path: KeyPath) -> list[str]:
    """The keys that a section can have."""
    schema = _schema(model)
    definitions: dict[str, Any] = schema.get("$defs", {})
    found: Any = schema
    for part in (*path, None):
        options = found.get("anyOf", [found])
        options = [definitions[each["$ref"].rsplit("/", 1)[1]] if "$ref" in each else each for each in options]
        found = next((each for each in options if "properties" in each or "additionalProperties" in each), NOTHING)
        if part is not None:
            inner: Any = found.get("properties", NOTHING).get(part) or found.get("additionalProperties")
            found = cast("Mapping[str, Any]", inner) if isinstance(inner, Mapping) else NOTHING
    return list(found.get("properties", NOTHING))


def _missing(path: KeyPath) -> str:
    if path[-1] != "_type":
        return "is missing: add this section"
    known = ", ".join(DATASET_TYPES) if path[-2:-1] == ("dataset",) else "docs/finetune.md has those of each part"
    return f"is missing: add the type ({known})"


def _sentence(path: KeyPath, errors: Sequence[Any], value: Any) -> str:
    """One sentence for a value, of which pydantic may have tried several types."""
    first = errors[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    ranges = [each for each in errors if each["type"] in RANGES]
    wanted = list(dict.fromkeys(_wanted(each) for each in ranges[:1] or errors))
    if path[-2:] == ("dataset", "_type") and isinstance(value, str):
        near = nearest(value, DATASET_TYPES)
        meant = f" did you mean {near!r}?" if near else ""
        return f"unknown type {value!r}:{meant} known: {', '.join(DATASET_TYPES)}"
    given = "" if str(path[-1] if path else "").endswith(SECRETS) else f", not {described(value)}"
    quotes = ": put it in quotes" if wanted == ["text"] and isinstance(value, int | float) else ""
    return f"must be {' or '.join(wanted)}{given}{quotes}"


def _literals(error: Any) -> list[str]:
    if error["type"] != "literal_error":
        return []
    return [each.strip(" '") for each in str(error["ctx"]["expected"]).replace(" or ", ",").split(",")]


RANGES = {
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "greater than {gt:g}",
    "less_than_equal": "at most {le:g}",
    "less_than": "less than {lt:g}",
    "finite_number": "a finite number",
    "string_too_short": "a text that is not empty",
}
WANTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "dict": "a section with keys",
    "model": "a section with keys",
    "list": "a list",
    "path": "the path of a file",
}


def _wanted(error: Any) -> str:
    kind = str(error["type"])
    if kind in RANGES:
        return RANGES[kind].format(**error.get("ctx", {}))
    if kind == "literal_error":
        return " or ".join(_literals(error))
    return WANTED.get(kind.split("_")[0], str(error["msg"]))


# --- names --------------------------------------------------------------------------------------------------------


def _check_refused(config: Config, problems: _Found) -> None:
    """What other harnesses do: each sentence names what does it here."""
    for parts in _parts(config):
        for name, component in parts.entries.items():
            if component.type == "dpo_traj_builder" or component.type.startswith("nemo_customizer_"):
                path = (parts.section, name)
                problems.add((*path, "_type"), DPO.format(next(iter(BUILT_IN[parts.kind]))))
                problems.silence(path)
    general = config.eval.general
    if _is_on(general.profiler):
        text = "the profiler is refused: leave it out; `art status` and the page show times, and `nat eval` profiles a workflow"
        problems.add(("eval", "general", "profiler"), text)
    if (general.output or {}).get("s3") is not None:
        problems.add(("eval", "general", "output", "s3"), NO_S3)


def _is_on(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_is_on(each) for each in cast("Mapping[str, Any]", value).values())
    return bool(value) and str(value).lower() not in ("false", "no", "off")


def _check_names(config: Config, problems: _Found) -> None:
    """The parts that `finetuning` names."""
    finetuning = config.finetuning
    if not finetuning.enabled:
        problems.add(("finetuning", "enabled"), "must be true to train: set it, or pass -o finetuning.enabled true")
    for parts in _parts(config):
        _check_name(("finetuning", parts.kind), parts.chosen, parts.entries, (parts.section,), problems)
    if config.workflow.type == "command" and finetuning.target_functions != ["<workflow>"]:
        text = 'a command has no functions inside of it: leave this out, or write ["<workflow>"]'
        problems.add(("finetuning", "target_functions"), text)
    elif not finetuning.target_functions:
        problems.add(("finetuning", "target_functions"), 'is empty, so nothing would be trained: write ["<workflow>"]')


def _check_name(path: KeyPath, name: str | None, known: Collection[str], section: KeyPath, problems: _Found) -> None:
    """Checks that a name is an entry of a section."""
    if problems.has((*section, name or "")):
        return
    if not known:
        problems.add(path, f"{dotted(section)} has no entry that this could name: add one")
    elif name is None:
        problems.add(path, f"is missing: name an entry of {dotted(section)} ({', '.join(known)})")
    elif name not in known:
        problems.add(path, f"{dotted(section)} has no {name!r}: {hint(name, known)}")


def _check_rewards(config: Config, problems: _Found) -> None:
    training, validation = config.finetuning.reward_function, config.finetuning.validation
    path: KeyPath = ("finetuning", "validation", "reward")
    _check_reward(("finetuning", "reward_function"), training, config, problems)
    ruler = _ruler(training, config)
    if validation.reward is not None:
        _check_reward(path, validation.reward, config, problems)
        if name := _ruler(validation.reward, config):
            problems.add(path, f"{name!r} is a ruler, which compares the rollouts of a group: name another evaluator")
    elif validation.dataset is not None and ruler:
        text = f"is missing: {ruler!r}, the reward of training, compares the rollouts of a group, which a validation has not"
        problems.add(path, f"{text}; name another evaluator")
    for name, builder in config.trajectory_builders.items():
        if ruler and name == config.finetuning.trajectory_builder and builder.num_generations < 2:
            text = f"must be at least 2: {ruler!r}, the reward of training, compares the rollouts of a row"
            problems.add(("trajectory_builders", name, "num_generations"), text)


def _check_reward(path: KeyPath, reward: RewardFunction, config: Config, problems: _Found) -> None:
    known = config.eval.evaluators
    if reward.name is not None and reward.weights is not None:
        problems.add((*path, "weights"), "name and weights exclude each other: leave one of them out")
    elif reward.weights is None:
        _check_name((*path, "name"), reward.name, known, EVALUATORS, problems)
    elif not any(reward.weights.values()) and not problems.touches((*path, "weights")):
        problems.add((*path, "weights"), "must have an evaluator whose weight is not 0")
    for name in reward.weights or {}:
        _check_name((*path, "weights", name), name, known, EVALUATORS, problems)


def _ruler(reward: RewardFunction, config: Config) -> str | None:
    """The evaluator of a reward that compares the rollouts of a group."""
    names = [reward.name, *(reward.weights or {})]
    known = config.eval.evaluators
    return next((name for name in names if name in known and known[name].type == "ruler"), None)


def _check_policy(config: Config, problems: _Found) -> None:
    path: KeyPath = ("finetuning", "target_model")
    if config.finetuning.trainer_adapter not in config.trainer_adapters or problems.has(("llms",)):
        return
    try:
        policy_llm(config)
    except ValueError as error:
        problems.add(path, str(error))


# --- data sets ----------------------------------------------------------------------------------------------------


def _check_datasets(config: Config, problems: _Found) -> None:
    training, validation = config.eval.general.dataset, config.finetuning.validation.dataset
    path: KeyPath = ("eval", "general", "dataset")
    if training is None:
        problems.add(path, "is missing: add the rows to train on, with _type and file_path")
    else:
        _check_dataset(path, training, problems)
    path = ("finetuning", "validation", "dataset")
    if isinstance(validation, Dataset):
        _check_dataset(path, validation, problems)
    elif validation is not None and validation.suffix not in DATA_SUFFIXES:
        problems.add(path, f"{str(validation)!r} must end in {', '.join(DATA_SUFFIXES)}, or be a section with _type")


def _check_dataset(path: KeyPath, dataset: Dataset, problems: _Found) -> None:
    if dataset.type == "xls":
        problems.add((*path, "_type"), "xls files are not read: save the sheet as CSV, and write csv")
        return
    for name in ("s3", "remote_file_path"):
        if getattr(dataset, name) is not None:
            problems.add((*path, name), NO_S3)
    if dataset.type != "custom":
        if dataset.file_path is None:
            problems.add((*path, "file_path"), f"is missing: add the path of a {dataset.type} file")
        for name in ("function", "kwargs"):
            if name in dataset.model_fields_set:
                problems.add((*path, name), "is only for _type: custom, leave it out")
    elif dataset.function is None:
        problems.add(
            (*path, "function"), f"is missing: name the function that returns the rows ({components.HOW_TO_NAME})"
        )
    else:
        try:
            components.locate("dataset", dataset.function)
        except ValueError as error:
            problems.add((*path, "function"), str(error))


# --- components ---------------------------------------------------------------------------------------------------


def _components(config: Config) -> Iterator[tuple[KeyPath, Kind, Component]]:
    """The parts that the harness makes, each with its place."""
    yield ("workflow",), "workflow", config.workflow
    for name, evaluator in config.eval.evaluators.items():
        yield (*EVALUATORS, name), "evaluator", evaluator
    for parts in _parts(config):
        for name, part in parts.entries.items():
            yield (parts.section, name), parts.kind, part


def _is_code(kind: Kind, type_name: str) -> bool:
    return type_name not in BUILT_IN[kind] and not components.is_of_toolkit(kind, type_name)


def _check_components(config: Config, toolkit: Toolkit | None, problems: _Found) -> None:
    for path, kind, component in _components(config):
        if component.type == UNKNOWN or problems.has(path):
            continue
        try:
            components.locate(kind, component.type, toolkit)
        except ValueError as error:
            problems.add((*path, "_type"), str(error))
        if component.type not in BUILT_IN[kind]:
            continue
        known = BUILT_IN[kind][component.type]
        for key in component.fields():
            if key not in known:
                problems.add((*path, key), f"{component.type} has no such field: {hint(key, sorted(known))}")
        if component.type == "command":
            _check_command(component.fields().get("command"), problems)


def _check_command(command: Any, problems: _Found) -> None:
    path: KeyPath = ("workflow", "command")
    if isinstance(command, str):
        try:
            command = shlex.split(command)
        except ValueError as error:
            problems.add(path, f"cannot be split into words: {error}; write a list of texts")
            return
    words = cast("list[Any]", command) if isinstance(command, list) else []
    if not words or not all(isinstance(each, str) and each for each in words):
        problems.add(path, f"must be a command line, or a list of texts, not {described(command)}")
    elif shutil.which(words[0]) is None:
        problems.add(
            path, f"there is no program {words[0]!r} in {Path.cwd()} or in PATH: install it, or write its path"
        )


def _check_adapter(path: KeyPath, backend: Backend, training: Mapping[str, Any], problems: _Found) -> None:
    """The fields of an adapter that go to the server."""
    if problems.has(path):
        return
    here = (*path, "backend")
    if backend.url is not None and (backend.ip is not None or backend.port is not None):
        problems.add((*here, "url"), "url stands in place of ip and port: leave one of the two out")
    elif backend.url is not None and not backend.url.startswith(("http://", "https://")):
        problems.add((*here, "url"), f"must begin with http:// or https://, not {described(backend.url)}")
    elif backend.ip is None and backend.port is not None:
        problems.add((*here, "ip"), "is missing: add the address of the server, such as localhost")
    try:
        art.TrainableModel(name=backend.name, project=backend.project, base_model=backend.base_model)
    except ValidationError as error:
        for each in error.errors(include_url=False):
            problems.add((*here, *each["loc"]), str(each.get("ctx", {}).get("error", each["msg"])))
    _check_fields((*path, "training"), training, art.TrainConfig, TRAINER_ARGS.split(), problems)
    _check_fields((*here, "init_args"), backend.init_args or {}, InitArgs, INIT_ARGS.split(), problems)
    _check_fields((*here, "engine_args"), backend.engine_args or {}, EngineArgs, None, problems)


def _check_fields(
    path: KeyPath,
    given: Mapping[str, Any],
    model: type[BaseModel],
    others: Collection[str] | None,
    problems: _Found,
) -> None:
    """Checks fields by a model. `others` are accepted too; None: all that are not like one of the model's."""
    known = {name: value for name, value in given.items() if name in model.model_fields}
    for name in given:
        if name in known or (others is not None and name in others):
            continue
        if others is not None:
            near = nearest(name, model.model_fields) or nearest(name, others)
            meant = f"did you mean {near!r}?" if near else f"known: {', '.join(model.model_fields)}"
            problems.add((*path, name), f"unknown field: {meant}")
        elif near := nearest(name, model.model_fields, ALMOST):
            problems.add((*path, name), f"unknown field: did you mean {near!r}?")
    try:
        model.model_validate({name: value for name, value in known.items() if value is not None})
    except ValidationError as error:
        _translate(error, dict(known), path, problems, model)
