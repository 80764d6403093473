"""The sections of a finetuning file: NVIDIA's fields with their defaults, and ours. docs/finetune.md has them in one table.

Source of NVIDIA's: `nat.data_models.finetuning`, `nat.data_models.evaluate_config` and the plugin
`nvidia-nat-openpipe-art`, all of version 1.9.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

Percentile: TypeAlias = Annotated[float, Field(gt=0, le=1)]
Fields: TypeAlias = dict[str, Any]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)


class Component(BaseModel):
    """A part that `_type` names. The part checks its other fields itself."""

    model_config = ConfigDict(extra="allow", frozen=True, populate_by_name=True)

    type: str = Field(alias="_type", min_length=1)
    """A built-in name, `package.module:name`, `path/file.py:name`, an entry point of the group `art.finetune`, or a component
    of NVIDIA's toolkit."""

    def fields(self) -> Fields:
        """The fields beside `_type`."""
        return dict(self.model_extra or {})


class LLM(Component):
    """A language model. For the policy's, address, key and model come from the run; other fields are sampling parameters."""

    model_name: str | None = Field(default=None, validation_alias=AliasChoices("model_name", "model"))
    base_url: str | None = None
    api_key: str | None = Field(default=None, repr=False)


class Structure(Section):
    question_key: str = "question"
    answer_key: str = "answer"
    generated_answer_key: str = "generated_answer"
    trajectory_key: str = "intermediate_steps"
    expected_trajectory_key: str = "expected_intermediate_steps"
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


class Dataset(Section):
    type: Literal["json", "jsonl", "csv", "parquet", "custom", "xls"] = Field(alias="_type")
    file_path: Path | None = None
    """Relative to the current directory."""
    id_key: str = "id"
    structure: Structure = Structure()
    filter: RowFilter = RowFilter()
    function: str | None = None
    """custom: a function that returns rows, `package.module:name`, `package.module.name` or `path/file.py:name`. It gets
    `kwargs`, and `file_path` if it is given."""
    kwargs: Fields = {}
    remote_file_path: str | None = None
    s3: Any = None


class EvalGeneral(Section):
    max_concurrency: int = Field(default=8, ge=1)
    """Rollouts that run at a time, over all groups."""
    output_dir: Path | None = None
    workflow_alias: str | None = None
    output: Fields | None = None
    dataset: Dataset | None = None
    """The rows that are trained on."""
    rollout_timeout_seconds: float = Field(default=1800, gt=0)
    profiler: Any = None
    validate_llm_endpoints: bool = False
    per_input_user_id: bool = True


class Eval(Section):
    general: EvalGeneral = EvalGeneral()
    evaluators: dict[str, Component] = {}


class RewardFunction(Section):
    name: str | None = None
    """An evaluator."""
    weights: dict[str, float] | None = None
    """Several evaluators: the reward is the sum of weight * score."""


class BuilderSection(Component):
    num_generations: int = Field(default=2, ge=1)
    """Rollouts of each row."""
    reward: RewardFunction | None = None


class TrainerSection(Component):
    reward: RewardFunction | None = None


class Backend(Section):
    ip: str | None = None
    port: int | None = Field(default=None, ge=1, le=65535)
    url: str | None = None
    """In place of `ip` and `port`. Without an address: ART_SERVER_URL, else a server that this program starts."""
    name: str = "trainer_run"
    project: str = "trainer_project"
    base_model: str = "Qwen/Qwen2.5-7B-Instruct"
    api_key: str | None = Field(default=None, repr=False)
    """Default: ART_API_KEY. NVIDIA's "default" means no key."""
    delete_old_checkpoints: bool = False
    init_args: Fields | None = None
    engine_args: Fields | None = None
    server_config: Fields | None = None


class AdapterSection(Component):
    backend: Backend = Backend()
    training: Fields = {}
    """Fields of `art.TrainConfig`."""
    reward: RewardFunction | None = None


class Curriculum(Section):
    enabled: bool = False
    initial_percentile: Percentile = 0.3
    increment_percentile: Percentile = 0.2
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


class Validation(Section):
    dataset: Path | Dataset | None = None
    """A file, read as the training data set is, or a data set."""
    interval: int = Field(default=5, ge=1)
    """Epochs."""
    reps: int = Field(default=1, ge=1)
    reward: RewardFunction | None = None
    """Default: the reward of training."""


class Finetuning(Section):
    enabled: bool = False
    trainer: str | None = None
    trajectory_builder: str | None = None
    trainer_adapter: str | None = None
    reward_function: RewardFunction = RewardFunction()
    target_functions: list[str] = ["<workflow>"]
    """Functions whose calls are trained: the innermost around a call counts, "<workflow>" means outside of all."""
    target_model: str | None = None
    """The policy's entry of `llms`, by key or model name."""
    curriculum_learning: Curriculum = Curriculum()
    num_epochs: int = Field(default=1, ge=1)
    output_dir: Path = Path(".tmp/nat/finetuning")
    run_configuration: Any = None
    validation: Validation = Validation()
    seed: int | None = Field(default=None, ge=0)
    max_exceptions: float = Field(default=0.1, ge=0)
    """Failed rollouts of an epoch that are tolerated: a number, or a share if between 0 and 1."""


class Config(Section):
    """A whole file."""

    llms: dict[str, LLM] = {}
    workflow: Component
    eval: Eval
    trajectory_builders: dict[str, BuilderSection] = {}
    trainer_adapters: dict[str, AdapterSection] = {}
    trainers: dict[str, TrainerSection] = {}
    finetuning: Finetuning

    functions: dict[str, Component] = {}
    function_groups: dict[str, Component] = {}
    general: Fields = {}
    middleware: Fields = {}
    embedders: Fields = {}
    memory: Fields = {}
    object_stores: Fields = {}
    optimizer: Fields = {}
    retrievers: Fields = {}
    ttc_strategies: Fields = {}
    authentication: Fields = {}

    @property
    def builder(self) -> BuilderSection:
        return self.trajectory_builders[self.finetuning.trajectory_builder or ""]

    @property
    def adapter(self) -> AdapterSection:
        return self.trainer_adapters[self.finetuning.trainer_adapter or ""]

    @property
    def trainer(self) -> TrainerSection:
        return self.trainers[self.finetuning.trainer or ""]


TOOLKIT_SECTIONS = (
    "functions",
    "function_groups",
    "general",
    "middleware",
    "embedders",
    "memory",
    "object_stores",
    "optimizer",
    "retrievers",
    "ttc_strategies",
    "authentication",
)
"""Sections that only workflows of the toolkit use."""
