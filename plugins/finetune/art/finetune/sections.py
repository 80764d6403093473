"""The sections of a finetuning file: NVIDIA's fields with their defaults, and ours. docs/finetune.md has them in one table.

A rule for one section stands here; `checking` has the rules for several. Source of NVIDIA's fields:
`nat.data_models.finetuning`, `nat.data_models.evaluate_config` and the plugin `nvidia-nat-openpipe-art`, all of version 1.9.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias, cast

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

import art
from art.finetune import components
from art.finetune.reading import typed

Percentile: TypeAlias = Annotated[float, Field(gt=0, le=1)]
Fields: TypeAlias = Annotated[dict[str, Any], BeforeValidator(typed)]
UNUSED = "unused"
Unused: TypeAlias = Annotated[Any, UNUSED, Field(description="Without effect here.")]
"""A field of the toolkit without effect here."""


def refused(text: str) -> AfterValidator:
    """The rule that a field must not be set."""

    def refuse(given: Any) -> Any:
        if given:
            raise ValueError(text)
        return given

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

    @model_validator(mode="before")
    @classmethod
    def _with_types(cls, given: Any) -> Any:  # Any: the input is not validated yet
        """The other fields with the types that their variables stand for. The types of known fields are known."""
        if not isinstance(given, Mapping):
            return given
        known = set(cls.model_fields)
        for field in cls.model_fields.values():
            choices = field.validation_alias
            known |= {str(each) for each in choices.choices} if isinstance(choices, AliasChoices) else {str(choices)}
        fields = cast("Mapping[str, Any]", given)
        return {name: value if name in known else typed(value) for name, value in fields.items()}

    def fields(self) -> Fields:
        """The other fields."""
        return dict(self.model_extra or {})


class Component(OpenSection):
    """A part that `_type` names. The part checks its other fields itself."""

    type: str = Field(alias="_type", min_length=1)
    """A built-in name, `package.module:name`, `path/file.py:name`, an entry point of the group `art.finetune`, or a component
    of NVIDIA's toolkit."""


class LLM(Component):
    """A language model. For the policy's, address, key and model come from the run; other fields are sampling parameters."""

    model_name: str | None = Field(default=None, validation_alias=AliasChoices("model_name", "model"))
    """The model's name at its address."""
    base_url: str | None = None
    """The address, with /v1."""
    api_key: str | None = Field(default=None, repr=False)
    """The key of its address."""


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


def _no_xls(given: Any) -> Any:
    if given == "xls":
        raise ValueError("xls files are not read: save the sheet as CSV, and write csv")
    return given


def _is_function(given: str) -> str:
    components.check("dataset", given)
    return given


class Dataset(Section):
    type: Annotated[Literal["json", "jsonl", "csv", "parquet", "custom"], BeforeValidator(_no_xls)] = Field(
        alias="_type"
    )
    """The kind of file, or custom for a function."""
    file_path: Path | None = None
    """Relative to the current directory."""
    id_key: str = "id"
    """The column with the row's id; a row without one has its number."""
    structure: Structure = Structure()
    """Which columns mean what."""
    filter: RowFilter = RowFilter()
    """Which rows are taken."""
    function: Annotated[str, AfterValidator(_is_function)] | None = None
    """custom: a function that returns rows, `package.module:name`, `package.module.name` or `path/file.py:name`. It gets
    `kwargs`, and `file_path` if it is given."""
    kwargs: Fields = {}
    """custom: arguments of the function."""
    remote_file_path: NoS3 = None
    s3: NoS3 = None

    @model_validator(mode="after")
    def _has_source(self) -> Self:
        if self.type == "custom" and self.function is None:
            raise ValueError(f"function is missing: name the one that returns the rows ({components.HOW_TO_NAME})")
        if self.type != "custom" and self.file_path is None:
            raise ValueError(f"file_path is missing: add the path of a {self.type} file")
        return self


class Output(OpenSection):
    s3: NoS3 = None


class EvalGeneral(Section):
    max_concurrency: int = Field(default=8, ge=1)
    """Rollouts that run at a time, over all groups."""
    dataset: Dataset
    """The rows that are trained on."""
    rollout_timeout_seconds: float = Field(default=1800, gt=0)
    """A rollout that takes longer fails, and one whose evaluator does."""
    output_dir: Unused = None
    workflow_alias: Unused = None
    output: Annotated[Output | None, UNUSED, Field(description="Without effect here.")] = None
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
    """What scores a rollout, by name."""


class RewardFunction(Section):
    name: str | None = None
    """An evaluator."""
    weights: dict[str, float] | None = None
    """Several evaluators: the reward is the sum of weight * score."""

    @model_validator(mode="after")
    def _is_choice(self) -> Self:
        if (self.name is None) == (self.weights is None):
            raise ValueError("must have either a name or weights: evaluators of eval.evaluators")
        if self.weights is not None and not any(self.weights.values()):
            raise ValueError("weights must have an evaluator whose weight is not 0")
        return self


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
    """Arguments of vLLM. The server knows the others, and notes those without effect."""

    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """The share of the device's memory that the engine takes."""
    tensor_parallel_size: int | None = Field(default=None, ge=1)
    """Devices that share a model."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Requests that are sampled at a time."""


class Backend(Section):
    ip: str | None = None
    """The server's address; 0.0.0.0 is this machine."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """The server's port; default 7623."""
    url: str | None = Field(default=None, pattern="^https?://")
    """In place of `ip` and `port`. Without an address: ART_SERVER_URL, else a server that this program starts."""
    name: str = "trainer_run"
    """The model's name."""
    project: str = "trainer_project"
    """The model's project."""
    base_model: str = "Qwen/Qwen2.5-7B-Instruct"
    """A Hugging Face id, a folder on the server, or art/tiny."""
    api_key: str | None = Field(default=None, repr=False)
    """Default: ART_API_KEY. NVIDIA's "default" means no key."""
    lora: art.LoRAConfig | None = None
    """Of a new model: `rank` (8), `alpha` (16) and `target_modules` (all linear layers). An existing model keeps its own."""
    delete_old_checkpoints: bool = False
    """Before each train call, all but the newest and the best."""
    init_args: InitArgs | None = None
    """As in NVIDIA's plugin; the server notes what has no effect."""
    engine_args: EngineArgs | None = None
    """Arguments of vLLM, if this run starts the engine."""
    server_config: Unused = None

    @model_validator(mode="after")
    def _has_address_and_names(self) -> Self:
        if self.url is not None and (self.ip is not None or self.port is not None):
            raise ValueError("url stands in place of ip and port: leave one of the two out")
        if self.port is not None and self.ip is None:
            raise ValueError("ip is missing: add the address of the server, such as localhost")
        art.TrainableModel(name=self.name, project=self.project, base_model=self.base_model)
        return self


class Training(art.TrainConfig):
    """The fields of `art.TrainConfig`. Others of the toolkit are kept, and have no effect."""

    model_config = ConfigDict(extra="allow", frozen=True)


class AdapterSection(Component):
    backend: Backend = Backend()
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
    expansion_interval: int = Field(default=5, ge=1)
    """Epochs between two expansions."""
    min_reward_diff: float = Field(default=0.1, ge=0)
    """Groups whose rewards differ by less are left out."""
    sort_ascending: bool = False
    """Hard groups first."""
    random_subsample: Percentile | None = None
    """The share of each group's trajectories that is trained; at least two."""
    rank: Literal["every_epoch", "on_expansion"] = "every_epoch"
    """on_expansion: samples all rows only in epoch 0 and at expansions, and between them the rows that were selected."""


def _of_file(given: Any) -> Any:
    """The section that a path stands for."""
    if isinstance(given, str | Path):
        return {"_type": Path(given).suffix.removeprefix("."), "file_path": given}
    return given


class Validation(Section):
    dataset: Annotated[Dataset | None, BeforeValidator(_of_file, json_schema_input_type=str | Dataset | None)] = None
    """A data set, or its file. What it does not set is as in the training data set: `id_key`, `structure` and `filter`."""
    interval: int = Field(default=5, ge=1)
    """Epochs."""
    reps: int = Field(default=1, ge=1)
    """Rollouts of each row."""
    reward: RewardFunction | None = None
    """Default: the reward of training."""


def _must_be_true(given: bool) -> bool:
    if not given:
        raise ValueError("must be true to train: set it, or pass -o finetuning.enabled true")
    return given


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
    """Which evaluators make the reward."""
    target_functions: list[str] = Field(default=["<workflow>"], min_length=1)
    """Functions whose calls are trained: the innermost around a call counts, "<workflow>" means outside of all."""
    target_model: str | None = None
    """The policy's entry of `llms`, by key or model name."""
    curriculum_learning: Curriculum = Curriculum()
    """Which groups of an epoch are trained."""
    num_epochs: int = Field(default=1, ge=1)
    """Times that all rows are sampled and trained on."""
    output_dir: Path = Path(".tmp/nat/finetuning")
    """Where the run's files are, and where the run is continued."""
    run_configuration: Unused = None
    validation: Validation = Validation()
    """Rows that are evaluated between epochs."""
    seed: int | None = Field(default=None, ge=0)
    """Of rollouts and curriculum; default: drawn."""
    max_exceptions: float = Field(default=0.1, ge=0)
    """Failed rollouts of an epoch that are tolerated: a number, or a share if between 0 and 1."""


OF_TOOLKIT = Field(description="Of workflows that are registered with NVIDIA's toolkit.")
OfToolkit: TypeAlias = Annotated[Fields, OF_TOOLKIT]


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
    """What a rollout runs."""
    eval: Eval
    """Rows, limits and evaluators."""
    trajectory_builders: dict[str, BuilderSection] = {}
    """What samples an epoch, by name."""
    trainer_adapters: dict[str, AdapterSection] = {}
    """What trains on an epoch, by name."""
    trainers: dict[str, TrainerSection] = {}
    """What runs the epochs, by name."""
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
