"""The sections of a finetuning file: NVIDIA's fields with their defaults, and ours. docs/finetune.md has them in one table.

The rules for a single section are here; `checking` has the rules for several sections. Source of NVIDIA's fields:
`nat.data_models.finetuning`, `nat.data_models.evaluate_config` and the plugin `nvidia-nat-openpipe-art`, all of version 1.9.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

import art
from art.finetune import components
from art.finetune.reading import dataset_of_file, typed
from art_protocol.sampling import PARAMETERS
from art_protocol.tracking import check_tracker_name
from art_protocol.wire import NAME_PATTERN, NAME_RULE

Percentile: TypeAlias = Annotated[float, Field(gt=0, le=1)]
Typed: TypeAlias = Annotated[Any, BeforeValidator(typed)]
"""A field without a declared type. A text with a variable becomes the number or boolean that YAML reads in the text."""
TypedFields: TypeAlias = dict[str, Typed]
UNUSED = "unused"
Unused: TypeAlias = Annotated[Any, UNUSED, Field(description="Without effect here.")]
"""A field of the toolkit without effect here."""


def refused(text: str) -> AfterValidator:
    """The rule that a field must not be set. `text` is the error's message."""

    def refuse(value: Any) -> Any:
        if value:
            raise ValueError(text)
        return value

    return AfterValidator(refuse)


NoS3: TypeAlias = Annotated[
    Any,
    Field(description="Refused: files are those of this machine."),
    refused("data are not read from or written to S3: use files on this machine"),
]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class OpenSection(Section):
    """A section that can have other fields."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Typed] = Field(init=False)  # pyright: ignore[reportIncompatibleVariableOverride]
    """The other fields. Source of the declaration: pydantic's documentation of `extra`."""

    def fields(self) -> dict[str, Any]:
        """The other fields."""
        return dict(self.model_extra or {})


class Component(OpenSection):
    """A part that `_type` names. The part checks its other fields itself."""

    type: str = Field(alias="_type", min_length=1)
    """A built-in name, `package.module:name`, `path/file.py:name`, an entry point of the group `art.finetune`, or a component
    of NVIDIA's toolkit."""


class LLM(Component):
    """A language model. The policy has the address, the key and the model of the run. Other fields are sampling parameters."""

    model_name: str | None = Field(default=None, validation_alias=AliasChoices("model_name", "model"))
    """The model's name at its address."""
    base_url: str | None = None
    """The address, with /v1."""
    api_key: str | None = Field(default=None, repr=False)
    """The key for the address."""
    temperature: float | None = Field(default=None, ge=0, le=2)
    """The policy's wins over the one in requests of the workflow, whatever the workflow is. So do `top_p` and `max_tokens`."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """The share of probability from which a token is sampled."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens of an answer."""

    @property
    def sampling(self) -> dict[str, float]:
        """The sampling parameters that are set."""
        return self.model_dump(include={*PARAMETERS}, exclude_none=True)

    def fields(self) -> dict[str, Any]:
        """The sampling parameters that are set, and the other fields."""
        return self.sampling | super().fields()


class Structure(Section):
    question_key: str = "question"
    """The column with the question."""
    answer_key: str = "answer"
    """The column with the right answer."""
    generated_answer_key: Unused = None
    trajectory_key: Unused = None
    expected_trajectory_key: Unused = None
    disable: bool = False
    """The question is the whole row as JSON."""


class Columns(Section):
    field: dict[str, list[Any]] = {}
    """Values by column."""


class RowFilter(Section):
    allowlist: Columns | None = None
    """Keeps rows that have one of the values in each of these columns."""
    denylist: Columns | None = None
    """Leaves out rows that have one of the values in one of these columns."""


def _no_xls(value: Any) -> Any:
    if value == "xls":
        raise ValueError("xls files are not read: save the sheet as CSV, and write csv")
    return value


class DatasetSection(Section):
    type: Annotated[Literal["json", "jsonl", "csv", "parquet", "hub", "custom"], BeforeValidator(_no_xls)] = Field(
        alias="_type"
    )
    """The kind of file, hub for a data set of the Hugging Face hub, or custom for a function."""
    file_path: Path | None = None
    """The file, relative to the current directory."""
    delimiter: str | None = Field(default=None, max_length=1, pattern=r'[^"\r\n]')
    """For csv: the character between columns. Default: the comma, semicolon or tab of the first line."""
    encoding: str | None = None
    """For csv: the encoding, such as cp1252. Default: UTF-8, else Windows-1252."""
    id_key: str = "id"
    """The column with the row's id. The id of a row without this column is the row's number."""
    structure: Structure = Structure()
    """The columns with the question and the answer."""
    filter: RowFilter = RowFilter()
    """The rows that are taken."""
    ids: list[Annotated[str, Field(coerce_numbers_to_str=True)]] = []
    """Takes only the rows with these ids."""
    limit: int | None = Field(default=None, ge=1)
    """Takes only the first rows, after `filter` and `ids`."""
    name: str | None = None
    """For hub: the id of the data set, such as openai/gsm8k."""
    subset: str | None = None
    """For hub: the configuration of the data set, if the data set has several."""
    split: str = "train"
    """For hub: the split."""
    revision: str | None = None
    """For hub: a branch, a tag or a commit. Default: the newest."""
    function: str | None = None
    """For custom: a function that returns rows, `package.module:name`, `package.module.name` or `path/file.py:name`. The function
    gets `kwargs`, and `file_path` if the file sets a path."""
    kwargs: TypedFields = {}
    """For custom: the arguments of the function."""
    remote_file_path: NoS3 = None
    s3: NoS3 = None

    @model_validator(mode="after")
    def _has_source(self) -> Self:
        if self.type == "custom" and self.function is None:
            raise ValueError(f"function is missing: name the one that returns the rows ({components.HOW_TO_NAME})")
        if self.type == "hub" and (self.name is None or self.file_path is not None):
            raise ValueError("a data set of the hub has a name, such as openai/gsm8k, and no file_path")
        if self.type not in ("custom", "hub") and self.file_path is None:
            raise ValueError(f"file_path is missing: add the path of a {self.type} file")
        return self


class OutputSection(OpenSection):
    s3: NoS3 = None


class EvalGeneral(Section):
    max_concurrency: int = Field(default=8, ge=1)
    """Rollouts that run at a time, over all groups."""
    dataset: DatasetSection
    """The rows that are trained on."""
    rollout_timeout_seconds: float = Field(default=1800, gt=0)
    """A rollout fails if it takes longer, or if one of its evaluators takes longer."""
    output_dir: Unused = None
    workflow_alias: Unused = None
    output: Annotated[OutputSection | None, UNUSED, Field(description="Without effect here.")] = None
    profiler: Annotated[
        Any,
        Field(description="Refused."),
        refused("profilers are refused: `art status` and the page show times, `nat eval` profiles a workflow"),
    ] = None
    validate_llm_endpoints: Unused = None
    per_input_user_id: Unused = None


class Eval(Section):
    general: EvalGeneral
    """The rows that are trained on, and limits of rollouts."""
    evaluators: dict[str, Component] = {}
    """The evaluators that score a rollout, by name."""


class RewardFunction(Section):
    name: str | None = None
    """The evaluator whose score is the reward."""
    weights: dict[str, float] | None = None
    """Several evaluators: the reward is the sum of weight * score."""

    @model_validator(mode="after")
    def _is_choice(self) -> Self:
        if (self.name is None) == (self.weights is None):
            raise ValueError("must have either a name or weights: evaluators of eval.evaluators")
        if self.weights is not None and not any(self.weights.values()):
            raise ValueError("weights must have an evaluator whose weight is not 0")
        return self

    @property
    def names(self) -> list[str]:
        """The evaluators."""
        return list(self.weights or [str(self.name)])


class BuilderSection(Component):
    num_generations: int = Field(default=2, ge=1)
    """Rollouts of each row."""
    reward: Unused = None


class TrainerSection(Component):
    reward: Unused = None


class InitArgs(OpenSection):
    max_seq_length: int | None = Field(default=None, ge=1)
    """Tokens of prompt and answer together."""


class EngineArgs(OpenSection):
    """Arguments of vLLM. The server knows the other arguments, and notes arguments without effect."""

    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """The share of the device's memory that the engine takes."""
    tensor_parallel_size: int | None = Field(default=None, ge=1)
    """Devices that share a model."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Requests that are sampled at a time."""


class LoRA(art.LoRAConfig):
    """The fields of `art.LoRAConfig`, and the fields of PEFT's that people set (`other_harnesses.LORA_FIELDS`)."""

    lora_dropout: Unused = None
    dropout: Unused = None
    use_rslora: Unused = None
    bias: Unused = None
    modules_to_save: Unused = None

    def __init__(self, **fields: Any) -> None:
        """Raises pydantic's errors, of which each has the location of a value in the file."""
        BaseModel.__init__(self, **fields)

    @classmethod
    def _accepted(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Leaves unknown fields to pydantic, which has an error for each."""
        known = {*cls.model_fields, *cls._renamed, *(cls._left_out or ())}
        unknown = {name: value for name, value in fields.items() if name not in known}
        return super()._accepted({name: fields[name] for name in fields if name in known}) | unknown

    def to_model(self) -> art.LoRAConfig:
        """The fields with an effect."""
        return art.LoRAConfig(**self.model_dump(include={*art.LoRAConfig.model_fields}, exclude_unset=True))


URL = "^https?://"
"""The pattern of a server's address."""


class BackendSection(Section):
    ip: str | None = None
    """The server's address; 0.0.0.0 is this machine."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """The server's port; default 7623."""
    url: str | None = Field(default=None, pattern=URL)
    """In place of `ip` and `port`. Without an address: ART_SERVER_URL, else a server that this program starts."""
    name: str = "trainer_run"
    """The model's name."""
    project: str = "trainer_project"
    """The model's project."""
    base_model: str = "Qwen/Qwen2.5-7B-Instruct"
    """A Hugging Face id, a folder on the server, or art/tiny."""
    api_key: str | None = Field(default=None, repr=False)
    """Default: ART_API_KEY. NVIDIA's "default" means no key."""
    lora: LoRA | None = None
    """The LoRA of a new model: `rank` (8), `alpha` (16) and `target_modules` (all linear layers). An existing model keeps its
    LoRA."""
    delete_old_checkpoints: bool = False
    """Whether each train call first deletes all checkpoints but the newest and the best."""
    init_args: InitArgs | None = None
    """As in NVIDIA's plugin. The server notes arguments without effect."""
    engine_args: EngineArgs | None = None
    """Arguments of vLLM, if this run starts the engine."""
    server_config: Unused = None

    @model_validator(mode="after")
    def _has_address(self) -> Self:
        if self.url is not None and (self.ip is not None or self.port is not None):
            raise ValueError("url stands in place of ip and port: leave one of the two out")
        if self.port is not None and self.ip is None:
            raise ValueError("ip is missing: add the address of the server, such as localhost")
        return self

    @field_validator("name", "project")
    @classmethod
    def _becomes_a_folder(cls, name: str) -> str:
        if not re.fullmatch(NAME_PATTERN, name):
            raise ValueError(f"{name!r} becomes a folder: {NAME_RULE}")
        return name

    @property
    def own_key(self) -> str | None:
        return None if self.api_key == "default" else self.api_key


class Training(art.TrainConfig):
    """The fields of `art.TrainConfig`. Other fields of the toolkit are kept, and have no effect. A cosine without `schedule_steps`
    ends with the run."""

    model_config = ConfigDict(extra="allow", frozen=True)

    def __init__(self, **fields: Any) -> None:
        """Raises pydantic's errors, of which each has the location of a value in the file."""
        BaseModel.__init__(self, **fields)

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        """No rule: `loading` sets the steps of a cosine without `schedule_steps`."""
        return self


class AdapterSection(Component):
    backend: BackendSection = BackendSection()
    """The server and the model."""
    training: Training = Training()
    """The configuration of each train call."""
    reward: Unused = None


class Curriculum(Section):
    enabled: bool = False
    """Whether groups are chosen by their rewards."""
    initial_percentile: Percentile = 0.3
    """The share of the groups with signal that is trained first."""
    increment_percentile: Percentile = 0.2
    """What an expansion adds to this share."""
    expansion_interval: float = Field(default=5, gt=0)
    """Epochs between two expansions; with `rows_per_step` also a part of an epoch, such as 0.1."""
    min_reward_diff: float = Field(default=0.1, ge=0)
    """Groups whose rewards differ by less are left out."""
    sort_ascending: bool = False
    """Whether hard groups come first."""
    random_subsample: Percentile | None = None
    """The share of each group's trajectories that is trained; at least two."""
    rank: Literal["every_epoch", "on_expansion"] = "every_epoch"
    """on_expansion: samples all rows only in epoch 0 and at expansions, and between them the rows that were selected."""


def _validation_dataset(value: Any) -> Any:
    try:
        if isinstance(value, float):
            raise ValueError("is a number")
        return dataset_of_file(value)
    except ValueError as error:
        share = "a share of the training rows is finetuning.validation.share (--validation_share)"
        raise ValueError(f"{error}; {share}") from error


class Validation(Section):
    dataset: Annotated[
        DatasetSection | None, BeforeValidator(_validation_dataset, json_schema_input_type=str | DatasetSection | None)
    ] = None
    """A data set, its file, or its id as hub:OWNER/NAME[/SUBSET][:SPLIT]. `id_key`, `structure` and `filter` default to the values
    of the training data set."""
    share: float | None = Field(default=None, gt=0, lt=1)
    """In place of `dataset`: the share of the training rows that is held out, and not trained. The seed chooses the rows."""
    interval: float = Field(default=5, gt=0)
    """Epochs between two validations; with `rows_per_step` also a part of an epoch, such as 0.1."""
    patience: int | None = Field(default=None, ge=1)
    """The run ends when so many validations one after the other were not better than the best before."""
    reps: int = Field(default=1, ge=1)
    """Rollouts of each row."""
    reward: RewardFunction | None = None
    """Default: the reward of training."""

    @model_validator(mode="after")
    def _is_choice(self) -> Self:
        if self.dataset is not None and self.share is not None:
            raise ValueError("share stands in place of dataset: leave one of the two out")
        return self

    @property
    def has_rows(self) -> bool:
        """Whether the file has validations."""
        return self.dataset is not None or self.share is not None


def _must_be_true(value: bool) -> bool:
    if not value:
        raise ValueError("must be true to train: set it, or pass -o finetuning.enabled true")
    return value


class Finetuning(Section):
    enabled: Annotated[bool, AfterValidator(_must_be_true)]
    """Has to be true."""
    trainer: str
    """A name in `trainers`."""
    trajectory_builder: str
    """A name in `trajectory_builders`."""
    trainer_adapter: str
    """A name in `trainer_adapters`."""
    reward_function: RewardFunction
    """The evaluators that make the reward."""
    target_functions: list[str] = Field(default=["<workflow>"], min_length=1)
    """Functions whose requests are trained. The innermost function around a request counts. "<workflow>" means outside of all
    functions."""
    target_model: str | None = None
    """The policy's entry of `llms`, by key or model name."""
    curriculum_learning: Curriculum = Curriculum()
    """The groups of an epoch that are trained."""
    num_epochs: int = Field(default=1, ge=1)
    """Times that all rows are sampled and trained on."""
    rows_per_step: int | None = Field(default=None, ge=1)
    """Rows that are sampled and then trained as one step. Each epoch has the rows in another order. Default: a step trains a whole
    epoch."""
    sample_ahead: bool = False
    """Whether the rows of the next step are sampled while a step trains. The trained answers are then one step older than the
    policy. For a server whose engines have devices of their own."""
    trackers: list[Annotated[str, AfterValidator(check_tracker_name)]] = []
    """Trackers of the run, such as wandb, with the backend's project and name. Their keys come from the environment."""
    output_dir: Path = Path(".tmp/nat/finetuning")
    """The folder with the run's files, from which the run is continued."""
    run_configuration: Unused = None
    validation: Validation = Validation()
    """Rows that are evaluated between epochs."""
    seed: int | None = Field(default=None, ge=0)
    """The seed of rollouts and curriculum. Default: drawn."""
    max_exceptions: int | float = Field(default=0.1, ge=0)
    """Failed rollouts that an epoch tolerates: a count (1), or a share (0.1, and 1.0 for all)."""

    @property
    def rewards(self) -> list[RewardFunction]:
        """The reward of training, and an own reward of validations."""
        own = self.validation.reward
        return [self.reward_function] if own is None else [self.reward_function, own]


OF_TOOLKIT = Field(description="For workflows that are registered with NVIDIA's toolkit.")
OfToolkit: TypeAlias = Annotated[TypedFields, OF_TOOLKIT]


class ToolkitSections(Section):
    """Sections that only workflows of the toolkit use."""

    functions: Annotated[dict[str, Component], OF_TOOLKIT] = {}
    function_groups: Annotated[dict[str, Component], OF_TOOLKIT] = {}
    general: OfToolkit = {}
    middleware: OfToolkit = {}
    embedders: OfToolkit = {}
    memory: OfToolkit = {}
    object_stores: OfToolkit = {}
    optimizer: OfToolkit = {}
    retrievers: OfToolkit = {}
    ttc_strategies: OfToolkit = {}
    authentication: OfToolkit = {}


TOOLKIT_SECTIONS = tuple(ToolkitSections.model_fields)


class Config(ToolkitSections):
    """A whole file."""

    llms: dict[str, LLM] = {}
    """Language models by name, among them the policy."""
    workflow: Component
    """The function or program that a rollout runs."""
    eval: Eval
    """Rows, limits and evaluators."""
    trajectory_builders: dict[str, BuilderSection] = {}
    """The parts that sample an epoch, by name."""
    trainer_adapters: dict[str, AdapterSection] = {}
    """The parts that train on an epoch, by name."""
    trainers: dict[str, TrainerSection] = {}
    """The parts that run the epochs, by name."""
    finetuning: Finetuning
    """The run."""

    @property
    def builder(self) -> BuilderSection:
        return self.trajectory_builders[self.finetuning.trajectory_builder]

    @property
    def adapter(self) -> AdapterSection:
        return self.trainer_adapters[self.finetuning.trainer_adapter]

    @property
    def trainer(self) -> TrainerSection:
        return self.trainers[self.finetuning.trainer]
