"""Workflows and evaluators that are registered with NVIDIA's NeMo Agent toolkit (nvidia-nat-core and nvidia-nat-eval 1.9).

A workflow is built once for a run, by the toolkit's own builder, with all sections of the file that only the toolkit knows. Its
policy gets address, key and model of the run.
"""

import contextlib
import functools
import importlib.util
import logging
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import art
from art.finetune import components
from art.finetune.components import Kind
from art.finetune.rows import Row
from art.finetune.scoring import Evaluator, Score, to_score
from art.finetune.sections import TOOLKIT_SECTIONS, Component, Config
from art.finetune.workflows import WORKFLOW, Call, Workflow, current_function

PACKAGES = ("nat.builder", "nat.plugins.eval")
ROOT = "root"
"""What the toolkit calls the place outside of all functions."""


class Registered:
    """The `_type`s that the toolkit knows. It imports its plugins when it is first asked."""

    def names(self, kind: Kind) -> list[str]:
        if kind not in ("workflow", "evaluator"):
            return []
        registry = _registry()
        found = registry.get_registered_functions() if kind == "workflow" else registry.get_registered_evaluators()
        return sorted({name for each in found for name in (each.local_name, each.full_type)})


def find() -> Registered | None:
    """The toolkit, if both of its packages are installed."""
    for name in PACKAGES:
        try:
            if importlib.util.find_spec(name) is None:
                return None
        except ModuleNotFoundError:
            return None
    return Registered()


@functools.cache
def _registry() -> Any:  # Any: the toolkit is installed in few environments
    from nat.cli.type_registry import GlobalTypeRegistry
    from nat.runtime.loader import PluginTypes, discover_and_register_plugins

    logging.getLogger("nat").setLevel(logging.WARNING)  # at INFO it logs all of the file, with its keys
    discover_and_register_plugins(PluginTypes.ALL)
    return GlobalTypeRegistry.get()


@dataclass(frozen=True, slots=True)
class Toolkit:
    """What the toolkit built of a file."""

    workflow: Workflow | None
    """None: the workflow is none of the toolkit's."""
    evaluators: dict[str, Evaluator]


def is_needed(config: Config) -> bool:
    """Whether a part of the file is one of the toolkit's."""
    evaluators = config.eval.evaluators.values()
    return components.is_of_toolkit("workflow", config.workflow.type) or any(
        components.is_of_toolkit("evaluator", each.type) for each in evaluators
    )


@contextlib.asynccontextmanager
async def build(config: Config, policy: str | None, model: art.TrainableModel) -> AsyncGenerator[Toolkit]:
    """The toolkit's parts of a file, whose policy is the model.

    Raises:
        ValueError: the toolkit refuses its sections.
    """
    _registry()
    from nat.data_models.config import Config as ToolkitConfig
    from nat.plugins.eval.runtime.builder import WorkflowEvalBuilder
    from nat.runtime.session import SessionManager

    has_workflow = components.is_of_toolkit("workflow", config.workflow.type)
    given: dict[str, Any] = {
        section: _dump(getattr(config, section)) for section in TOOLKIT_SECTIONS if getattr(config, section)
    }
    given["llms"] = {each: _dump(llm) for each, llm in config.llms.items()}
    if policy is not None:
        key = model.inference_api_key or "default"
        given["llms"][policy] |= {
            "base_url": model.inference_base_url,
            "api_key": key,
            "model_name": model.get_inference_name(),
        }
    if has_workflow:
        given["workflow"] = _dump(config.workflow)
    names = [
        each for each, section in config.eval.evaluators.items() if components.is_of_toolkit("evaluator", section.type)
    ]
    given["eval"] = {
        "general": {"max_concurrency": config.eval.general.max_concurrency},
        "evaluators": {each: _dump(config.eval.evaluators[each]) for each in names},
    }
    checked = ToolkitConfig.model_validate(given)
    async with WorkflowEvalBuilder.from_config(checked) as builder:
        workflow = None
        if has_workflow:
            sessions = await SessionManager.create(checked, builder, max_concurrency=0)
            workflow = _ToolkitWorkflow(sessions)
        yield Toolkit(workflow, {each: _ToolkitEvaluator(each, builder.get_evaluator(each)) for each in names})


def _dump(value: Any) -> Any:
    """A section as the file has it."""
    if isinstance(value, Component):
        return {"_type": value.type, **value.model_dump(exclude={"type"}, exclude_unset=True)}
    if isinstance(value, dict):
        return {name: _dump(each) for name, each in value.items()}
    return value


class _ToolkitWorkflow:
    def __init__(self, sessions: Any) -> None:
        self._sessions = sessions

    async def __call__(self, call: Call) -> Any:
        from pydantic import BaseModel

        async with (
            self._sessions.session(user_id=uuid.uuid4().hex) as session,
            session.run(call.row.question) as runner,
        ):
            output = await runner.result()
            with contextlib.suppress(ValueError):
                output = runner.convert(output, to_type=str)
        return output.model_dump_json() if isinstance(output, BaseModel) else output

    def function_name(self) -> str:
        """The innermost function around the current context: a block of `art.finetune.function`, or one of the toolkit."""
        from nat.builder.context import Context

        own = current_function.get()
        name: str = Context.get().active_function.function_name
        return name if own == WORKFLOW and name != ROOT else own


class _ToolkitEvaluator:
    def __init__(self, name: str, info: Any) -> None:
        self._name, self._evaluate = name, info.evaluate_fn

    async def __call__(self, row: Row, output: Any, trajectory: art.Trajectory) -> Score:
        from nat.data_models.evaluator import EvalInput, EvalInputItem

        item = EvalInputItem(
            id=row.id,
            input_obj=row.question,
            expected_output_obj=row.answer,
            output_obj=output,
            full_dataset_entry=dict(row.columns),
        )
        found = await self._evaluate(EvalInput(eval_input_items=[item]))
        (result,) = found.eval_output_items
        if result.error:
            raise ValueError(f"evaluator {self._name!r} failed: {result.error}")
        return to_score(self._name, result.score)
