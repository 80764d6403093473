"""ART's client: your code runs the agent's rollouts, and an art-server trains the model.

    model = art.TrainableModel(name="agent", project="demo", base_model="art/tiny")
    await model.register(art.Backend("http://gpu-box:7623"))
    groups = await art.gather_trajectory_groups(
        art.TrajectoryGroup(rollout(model, scenario) for _ in range(8)) for scenario in scenarios
    )
    await model.train(groups, config=art.TrainConfig(learning_rate=1e-5))

`import art` imports neither `openai` nor an HTTP client. What costs time is imported at its first use. So are the classes with
ART's arguments and ART's other names, which are in `art_compat`.
"""

# Programs use the imports for type checkers, this module does not.
# pyright: reportUnusedImport=false

import importlib
import importlib.util
import pkgutil
import sys
from typing import TYPE_CHECKING, Any

from art import types
from art.core.gather import gather_trajectories, gather_trajectory_groups
from art.data import DatasetBatch, iterate_dataset
from art.distillation import distill
from art.errors import ArtConnectionError, ArtError, ArtJobError, ArtStatusError
from art.evaluation import Estimate, Evaluation, evaluate
from art.job import Job
from art.retrying import retry
from art.scopes import no_capture
from art.sessions import Rollout, rollout
from art.teacher_prompts import with_feedback
from art.trajectories import History, Trajectory, TrajectoryGroup
from art.types import (
    LoRAConfig,
    Messages,
    MessagesAndChoices,
    Tools,
    TrainConfig,
    TrainResult,
    TrainSFTConfig,
)

if TYPE_CHECKING:
    import art.backend as _backend
    import art.dev as _dev
    import art.environments as _environments
    import art.finetune as _finetune
    import art.gather as _gather
    import art.harbor as _harbor
    import art.langgraph as _langgraph
    import art.local as _local
    import art.mcp as _mcp
    import art.metrics as _metrics
    import art.model as _model
    import art.rewards as _rewards
    import art.trackers as _trackers
    import art.utils as _utils
    from art.batches import trajectory_group_batches as trajectory_group_batches
    from art.capturing import capture
    from art.pipeline import PipelineTrainer
    from art.serverless import ServerlessBackend as ServerlessBackend
    from art.skypilot import SkyPilotBackend as SkyPilotBackend
    from art.types import LocalTrainResult as LocalTrainResult
    from art_compat.backends import Backend
    from art_compat.coroutines import auto_trajectory as auto_trajectory
    from art_compat.coroutines import capture_auto_trajectory as capture_auto_trajectory
    from art_compat.coroutines import current_trajectory as current_trajectory
    from art_compat.coroutines import trajectory as trajectory
    from art_compat.coroutines import trajectory_group as trajectory_group
    from art_compat.local import LocalBackend
    from art_compat.models import Model, TrainableModel
    from art_compat.refused import MegatronRuntimeConfig as MegatronRuntimeConfig
    from art_compat.refused import MegatronTopologyConfig as MegatronTopologyConfig
    from art_compat.refused import PipelineAutotuneConfig as PipelineAutotuneConfig
    from art_compat.refused import PipelineRuntimeConfig as PipelineRuntimeConfig
    from art_compat.refused import get_megatron_runtime_config as get_megatron_runtime_config
    from art_compat.refused import init_megatron_runtime_config as init_megatron_runtime_config
    from art_compat.yielding import capture_yielded_trajectory as capture_yielded_trajectory
    from art_compat.yielding import yield_trajectory as yield_trajectory

    # An imported module is private for type checkers in an installed package. A variable is public, and is no star name.
    backend = _backend
    dev = _dev
    environments = _environments
    finetune = _finetune
    gather = _gather
    harbor = _harbor
    langgraph = _langgraph
    local = _local
    mcp = _mcp
    metrics = _metrics
    model = _model
    rewards = _rewards
    trackers = _trackers
    utils = _utils

__all__ = [
    "ArtConnectionError",
    "ArtError",
    "ArtJobError",
    "ArtStatusError",
    "Backend",
    "DatasetBatch",
    "Estimate",
    "Evaluation",
    "History",
    "Job",
    "LoRAConfig",
    "LocalBackend",
    "Messages",
    "MessagesAndChoices",
    "Model",
    "PipelineTrainer",
    "Rollout",
    "Tools",
    "TrainConfig",
    "TrainResult",
    "TrainSFTConfig",
    "TrainableModel",
    "Trajectory",
    "TrajectoryGroup",
    "capture",
    "distill",
    "evaluate",
    "gather_trajectories",
    "gather_trajectory_groups",
    "iterate_dataset",
    "no_capture",
    "retry",
    "rollout",
    "types",
    "with_feedback",
]

# In the repository each package of plugins/ has a folder `art` of its own. An installed package has one for all.
__path__ = pkgutil.extend_path(__path__, __name__)

_MODULE_BY_NAME = {
    "Backend": "art_compat.backends",
    "LocalBackend": "art_compat.local",
    "LocalTrainResult": "art.types",
    "MegatronRuntimeConfig": "art_compat.refused",
    "MegatronTopologyConfig": "art_compat.refused",
    "Model": "art_compat.models",
    "PipelineAutotuneConfig": "art_compat.refused",
    "PipelineRuntimeConfig": "art_compat.refused",
    "PipelineTrainer": "art.pipeline",
    "ServerlessBackend": "art.serverless",
    "SkyPilotBackend": "art.skypilot",
    "TrainableModel": "art_compat.models",
    "auto_trajectory": "art_compat.coroutines",
    "capture": "art.capturing",
    "capture_auto_trajectory": "art_compat.coroutines",
    "capture_yielded_trajectory": "art_compat.yielding",
    "current_trajectory": "art_compat.coroutines",
    "get_megatron_runtime_config": "art_compat.refused",
    "init_megatron_runtime_config": "art_compat.refused",
    "trajectory": "art_compat.coroutines",
    "trajectory_group": "art_compat.coroutines",
    "trajectory_group_batches": "art.batches",
    "yield_trajectory": "art_compat.yielding",
}
"""The names that are imported at their first use, with their modules. Type checkers read the imports above."""

if not TYPE_CHECKING:  # with `__getattr__` a type checker would accept every misspelt name

    def __getattr__(name: str) -> Any:
        """A name of the table, or a module of the package such as `art.rewards`."""
        if name in _MODULE_BY_NAME:
            return getattr(importlib.import_module(_MODULE_BY_NAME[name]), name)
        module = f"{__name__}.{name}"
        if importlib.util.find_spec(module) is None:
            # Python expects this error of a module's `__getattr__`: `hasattr` and `from art import NAME` answer no other.
            # With `name` and `obj` Python adds the attribute that was meant.
            text = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(text, name=name, obj=sys.modules[__name__])
        return importlib.import_module(module)


def __dir__() -> list[str]:
    modules = {module.name for module in pkgutil.iter_modules(__path__)}
    return sorted({*globals(), *__all__, *_MODULE_BY_NAME, *modules})
