"""Workflows and evaluators that are registered with NVIDIA's NeMo Agent toolkit (nvidia-nat-core and nvidia-nat-eval 1.9).

The toolkit's own builder builds a workflow once for a run, with all sections of the file that only the toolkit knows. The
workflow's policy gets the address, the key and the model of the run.
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
from art.finetune.components import Kind, Toolkit
from art.finetune.rows import DatasetRow
from art.finetune.scoring import Evaluator
from art.finetune.sections import TOOLKIT_SECTIONS, Component, Config
from art.finetune.workflows import WORKFLOW, Call, Workflow, current_function

PACKAGES = ("nat.builder", "nat.plugins.eval")
CAUGHT = "Evaluator error: "
ROOT = "root"
"""The toolkit's name for the level outside of all functions."""


def find() -> Toolkit | None:
    """The `_type`s that the toolkit knows, if both of its packages are installed. The first call imports the toolkit's plugins."""
    with contextlib.suppress(ModuleNotFoundError):  # `find_spec` raises if a parent package such as `nat` is missing
        if all(importlib.util.find_spec(name) for name in PACKAGES):
            return _names
    return None


def _names(kind: Kind) -> list[str]:
    if kind not in ("workflow", "evaluator"):
        return []
    registry = _registry()
    registered = registry.get_registered_functions() if kind == "workflow" else registry.get_registered_evaluators()
    # A file may name a component alone or with its package, `package/name`.
    return sorted({name for info in registered for name in (info.local_name, info.full_type)})


@functools.cache
def _registry() -> Any:  # Any: the toolkit is installed in few environments
    from nat.cli.type_registry import GlobalTypeRegistry
    from nat.runtime.loader import PluginTypes, discover_and_register_plugins

    logging.getLogger("nat").setLevel(logging.WARNING)  # at INFO the toolkit logs the whole file, with its keys
    discover_and_register_plugins(PluginTypes.ALL)
    return GlobalTypeRegistry.get()


def innermost_function() -> str:
    """The innermost function around the current context: a block of `art.finetune.function`, or a function of the toolkit."""
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
    """The workflow and the evaluators of a file that belong to the toolkit, with `model` as their policy. The workflow is None if
    it is not the toolkit's.

    Raises:
        ValueError: the toolkit refuses a section.
    """
    has_workflow = components.is_of_toolkit("workflow", config.workflow.type)
    evaluators = {
        name: section
        for name, section in config.eval.evaluators.items()
        if components.is_of_toolkit("evaluator", section.type)
    }
    if not has_workflow and not evaluators:
        yield None, {}
        return
    _registry()
    from nat.data_models.config import Config as ToolkitConfig
    from nat.plugins.eval.runtime.builder import WorkflowEvalBuilder
    from nat.runtime.session import SessionManager

    sections = {name: _dump(getattr(config, name)) for name in (*TOOLKIT_SECTIONS, "llms")}
    sections = {name: value for name, value in sections.items() if value}
    if policy is not None:
        sections["llms"][policy] |= {
            "base_url": model.inference_base_url,
            "api_key": model.inference_api_key or "default",
            "model_name": model.get_inference_name(),
        }
    if has_workflow:
        sections["workflow"] = _dump(config.workflow)
    general = {"max_concurrency": config.eval.general.max_concurrency}
    sections["eval"] = {"general": general, "evaluators": _dump(evaluators)}
    checked = ToolkitConfig.model_validate(sections)
    async with WorkflowEvalBuilder.from_config(checked) as builder:
        workflow = None
        if has_workflow:
            # 0: no limit, because the gather call limits the rollouts.
            workflow = _workflow(await SessionManager.create(checked, builder, max_concurrency=0))
        yield workflow, {name: _evaluator(name, builder.get_evaluator(name)) for name in evaluators}


def _dump(value: Any) -> Any:
    """A section as the file has it."""
    if isinstance(value, Component):
        return {"_type": value.type, **value.model_dump(exclude={"type"}, exclude_unset=True)}
    if isinstance(value, dict):
        return {name: _dump(entry) for name, entry in value.items()}
    return value


def _workflow(sessions: Any) -> Workflow:
    # The build of the workflow loads this module if nvidia-nat-profiler is installed.
    profiler = sys.modules.get("nat.plugins.profiler.decorators.framework_wrapper")

    async def play(call: Call) -> Any:
        async with (
            # A workflow that the toolkit builds for each user needs an id. Each rollout gets a workflow of its own.
            sessions.session(user_id=uuid.uuid4().hex) as session,
            session.run(call.row.question) as runner,
        ):
            # LangChain's profiler copies each conversation for steps that nothing here reads: a sixth of a rollout's CPU time.
            # The runner has just restored the profiler, from the context of the workflow's build.
            if profiler is not None:
                profiler.callback_handler_var.set(None)
            output = await runner.result()
            with contextlib.suppress(ValueError):
                output = runner.convert(output, to_type=str)
        return output.model_dump_json() if isinstance(output, BaseModel) else output

    return play


def _evaluator(name: str, info: Any) -> Evaluator:
    from nat.data_models.evaluator import EvalInput, EvalInputItem

    async def evaluate(row: DatasetRow, output: Any, trajectory: art.Trajectory) -> Any:
        item = EvalInputItem(
            id=row.id,
            input_obj=row.question,
            expected_output_obj=row.answer,
            output_obj=output,
            full_dataset_entry=dict(row.columns),
        )
        evaluation = await info.evaluate_fn(EvalInput(eval_input_items=[item]))
        (result,) = evaluation.eval_output_items
        error = result.error or _caught_error(result.reasoning)
        if error:
            raise ValueError(f"evaluator {name!r} failed: {error}")
        return {"score": result.score, "reason": result.reasoning}

    return evaluate


def _caught_error(reasoning: Any) -> str | None:
    """The error that the toolkit's `BaseEvaluator.evaluate` caught: it gives a score of 0 with the error as reason, and leaves
    `error` empty. `{"error": "Evaluator error: no answer"} -> "no answer"`."""
    if not isinstance(reasoning, dict) or reasoning.keys() != {"error"}:
        return None
    text = str(reasoning["error"])
    return text.removeprefix(CAUGHT) if text.startswith(CAUGHT) else None
