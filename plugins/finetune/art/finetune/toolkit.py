"""Workflows and evaluators that are registered with NVIDIA's NeMo Agent toolkit (nvidia-nat-core and nvidia-nat-eval 1.9).

A workflow is built once for a run, by the toolkit's own builder, with all sections of the file that only the toolkit knows. Its
policy gets address, key and model of the run.
"""

import contextlib
import functools
import importlib.util
import logging
import sys
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from pydantic import BaseModel

import art
from art.finetune import components
from art.finetune.components import Kind
from art.finetune.rows import Row
from art.finetune.scoring import Evaluator
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
    with contextlib.suppress(ModuleNotFoundError):  # of the package that they are in
        if all(importlib.util.find_spec(name) for name in PACKAGES):
            return Registered()
    return None


@functools.cache
def _registry() -> Any:  # Any: the toolkit is installed in few environments
    from nat.cli.type_registry import GlobalTypeRegistry
    from nat.runtime.loader import PluginTypes, discover_and_register_plugins

    logging.getLogger("nat").setLevel(logging.WARNING)  # at INFO it logs all of the file, with its keys
    discover_and_register_plugins(PluginTypes.ALL)
    return GlobalTypeRegistry.get()


def innermost_function() -> str:
    """The innermost function around the current context: a block of `art.finetune.function`, or one of the toolkit."""
    own = current_function.get()
    if own != WORKFLOW or "nat.builder.context" not in sys.modules:
        return own
    from nat.builder.context import Context

    name: str = Context.get().active_function.function_name
    return WORKFLOW if name == ROOT else name


@contextlib.asynccontextmanager
async def building(
    config: Config, policy: str | None, model: art.TrainableModel
) -> AsyncGenerator[tuple[Workflow | None, dict[str, Evaluator]]]:
    """The workflow and the evaluators of a file that are the toolkit's. Their policy is the model.

    Raises:
        ValueError: the toolkit refuses its sections.
    """
    has_workflow = components.is_of_toolkit("workflow", config.workflow.type)
    evaluators = {
        name: each for name, each in config.eval.evaluators.items() if components.is_of_toolkit("evaluator", each.type)
    }
    if not has_workflow and not evaluators:
        yield None, {}
        return
    _registry()
    from nat.data_models.config import Config as ToolkitConfig
    from nat.plugins.eval.runtime.builder import WorkflowEvalBuilder
    from nat.runtime.session import SessionManager

    given = {section: _dump(getattr(config, section)) for section in (*TOOLKIT_SECTIONS, "llms")}
    given = {section: value for section, value in given.items() if value}
    if policy is not None:
        given["llms"][policy] |= {
            "base_url": model.inference_base_url,
            "api_key": model.inference_api_key or "default",
            "model_name": model.get_inference_name(),
        }
    if has_workflow:
        given["workflow"] = _dump(config.workflow)
    general = {"max_concurrency": config.eval.general.max_concurrency}
    given["eval"] = {"general": general, "evaluators": _dump(evaluators)}
    checked = ToolkitConfig.model_validate(given)
    async with WorkflowEvalBuilder.from_config(checked) as builder:
        workflow = None
        if has_workflow:
            workflow = _workflow(await SessionManager.create(checked, builder, max_concurrency=0))
        yield workflow, {name: _evaluator(name, builder.get_evaluator(name)) for name in evaluators}


def _dump(value: Any) -> Any:
    """A section as the file has it."""
    if isinstance(value, Component):
        return {"_type": value.type, **value.model_dump(exclude={"type"}, exclude_unset=True)}
    if isinstance(value, dict):
        return {name: _dump(each) for name, each in value.items()}
    return value


def _workflow(sessions: Any) -> Workflow:
    # Loaded by the build if nvidia-nat-profiler is installed.
    profiler = sys.modules.get("nat.plugins.profiler.decorators.framework_wrapper")

    async def play(call: Call) -> Any:
        async with (
            sessions.session(user_id=uuid.uuid4().hex) as session,
            session.run(call.row.question) as runner,
        ):
            # LangChain's profiler copies each conversation for steps that nothing here reads: a sixth of a rollout's CPU time.
            # The runner has just restored it, from the context of the workflow's build.
            if profiler is not None:
                profiler.callback_handler_var.set(None)
            output = await runner.result()
            with contextlib.suppress(ValueError):
                output = runner.convert(output, to_type=str)
        return output.model_dump_json() if isinstance(output, BaseModel) else output

    return play


def _evaluator(name: str, info: Any) -> Evaluator:
    from nat.data_models.evaluator import EvalInput, EvalInputItem

    async def evaluate(row: Row, output: Any, trajectory: art.Trajectory) -> Any:
        item = EvalInputItem(
            id=row.id,
            input_obj=row.question,
            expected_output_obj=row.answer,
            output_obj=output,
            full_dataset_entry=dict(row.columns),
        )
        found = await info.evaluate_fn(EvalInput(eval_input_items=[item]))
        (result,) = found.eval_output_items
        if result.error:
            raise ValueError(f"evaluator {name!r} failed: {result.error}")
        return result.score

    return evaluate
