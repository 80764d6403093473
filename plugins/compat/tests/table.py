"""What `plugins/compat/scripts/compatibility` cannot see in our code: which names of ART refuse or have no effect, our way where a name is
absent, and which tests call the names that work. test_compatibility.py verifies the claims."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import art
from art.pipeline import REFUSED_ARGUMENTS


def _call(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)()


REFUSED: dict[str, Callable[[], Any]] = {
    path: functools.partial(_call, path)
    for path in (
        "art.MegatronRuntimeConfig",
        "art.MegatronTopologyConfig",
        "art.PipelineAutotuneConfig",
        "art.PipelineRuntimeConfig",
        "art.dev.get_model_config",
        "art.dev.get_model_config.get_model_config",
        "art.get_megatron_runtime_config",
        "art.init_megatron_runtime_config",
        "art.megatron.MegatronBackend",
        "art.tinker.TinkerBackend",
        "art.tinker_native.TinkerNativeBackend",
        "art.utils.deployment.TogetherDeploymentConfig",
        "art.utils.deployment.WandbDeploymentConfig",
        "art.utils.deployment.deploy_model",
        "art.utils.deployment.deploy_wandb",
    )
} | {
    "art.Backend._experimental_deploy": lambda: art.Backend()._experimental_deploy(),
    "art.ServerlessBackend._experimental_deploy": lambda: art.Backend()._experimental_deploy(),
    "art.local.LocalBackend._experimental_deploy": lambda: art.Backend()._experimental_deploy(),
}
"""A call of each name that refuses. The page has the sentence that it raises."""
REFUSED |= {
    f"art.pipeline_trainer.PipelineTrainer({name})": functools.partial(art.PipelineTrainer, *[None] * 5, **{name: 1})
    for name in REFUSED_ARGUMENTS
}

_SILENT = "no effect"
_WARNED = "no effect, with a warning"
_KEPT = "kept with the model, no effect"
_PUSH, _PULL = "._experimental_push_to_s3", "._experimental_pull_from_s3"

NO_EFFECT: dict[str, str] = {
    "art.Model.entity": _KEPT,
    "art.Model.id": _KEPT,
    "art.Model.run_id": _KEPT,
    "art.Model.report_metrics": _KEPT,
    "art.ServerlessBackend(api_key)": "never sent; the call warns which server trains",
    "art.ServerlessBackend(base_url)": "never used; the call warns which server trains",
    "art.TrainableModel.register(_openai_client_config)": _WARNED,
    "art.TrainableModel.train_sft(_config)": _SILENT,
    "art.TrainableModel.train_sft(log_metrics)": _SILENT,
    "art.dev.OpenAIServerConfig": _WARNED,
    "art.dev.ServerArgs": _WARNED,
    "art.dev.TorchtuneArgs": _WARNED,
    "art.dev.TrainSFTConfig": _SILENT,
    "art.langgraph.init_chat_model(model_provider)": _SILENT,
    "art.local.LocalBackend(enable_expert_replay)": _SILENT,
    "art.local.LocalBackend(gpu_cost_per_hour_usd)": _WARNED,
    "art.local.LocalBackend(in_process)": "no effect: the server is always a process",
    "art.trajectory_group_batches(pbar_total_completion_tokens)": _SILENT,
    "art.utils.sft.train_sft_from_file(_config)": _SILENT,
    "art.utils.sft.train_sft_from_file(log_metrics)": _SILENT,
    **{f"{owner}{_PUSH}(delete)": _WARNED for owner in ("art.Backend", "art.local.LocalBackend")},
    **{f"{owner}{_PULL}(delete)": _WARNED for owner in ("art.Backend", "art.local.LocalBackend")},
    f"art.local.LocalBackend{_PULL}(exclude)": _WARNED,
    f"art.local.LocalBackend{_PULL}(latest_only)": "no effect: one step is copied",
}
"""Names that are taken without an effect."""

INSTEAD: dict[str, str] = {
    "art.Backend.exact_adapter_lease": "`PROJECT/NAME@step` names a step for inference",
    "art.LocalServingUnavailableError": "the openai client's own errors",
    "art.LocalTrainResult.": "`art export`",
    "art.MetricDefinition": "`docs/tracking.md`",
    "art.Model.merge_state": "a file of the program",
    "art.Model.overwrite_state": "a file of the program",
    "art.Model.read_state": "a file of the program",
    "art.Model.write_state": "a file of the program",
    "art.Model.update_wandb_config": "`art.Backend(trackers=['wandb'])`",
    "art.Model.safe_model_dump": "`model_dump`",
    "art.TrainableModel.safe_model_dump": "`model_dump`",
    "art.PIPELINE_RL": "`docs/tracking.md`",
    "art.TrainableModel.cost_calculator": "`track_api_cost`",
    "art.TrainableModel.set_cost_calculator": "`track_api_cost`",
    "art.Trajectory.": "`messages_and_choices`; the server keeps the exact tokens",
    "art.TrajectoryGroup.": "the server keeps the exact tokens",
    "art.costs": "`register_model_pricing`",
    "art.api_costs": "`register_model_pricing`",
    "art.dev.": "the flags of `art-server`",
    "art.errors": "`art.ArtError` and its subclasses",
    "art.get_tokenizer": "the server tokenizes",
    "art.langgraph": "any chat model of `init_chat_model`",
    "art.local.LocalBackend.": "`PROJECT/NAME@step` names a step for inference; `model.delete_checkpoints`",
    "art.openai": "the openai client's streams",
    "art.pipeline_trainer": "`art.PipelineTrainer`",
    "art.pipeline_trainer.PipelineTrainer.": "Ctrl-C: what has finished is kept for the next start",
    "art.tensorize": "the server keeps the exact tokens",
    "art.tokenize": "the server keeps the exact tokens",
    "art.trajectories.": "`messages_and_choices`; the server keeps the exact tokens",
    "art.utils.old_benchmarking": "`art.utils.benchmarking`",
    "art.utils.s3": "`art copy`",
}
"""Our way where names with this beginning are absent."""

_ROLLOUTS = "plugins/compat/tests/test_compat_rollouts.py::test_"
_MODELS = "plugins/compat/tests/test_compat_models.py::test_"
_NAMES = "plugins/compat/tests/test_compat_names.py::test_"
_SFT = "plugins/compat/tests/test_sft.py::test_"
_TOOLS = "plugins/compat/tests/test_compat_tools.py::test_"
_BUCKETS = """
    ._experimental_push_to_s3 ._experimental_pull_from_s3 ._experimental_fork_checkpoint
    {0}._experimental_push_to_s3: (model) (s3_bucket) (prefix) (verbose) (delete)
    {0}._experimental_pull_from_s3: (model) (s3_bucket) (prefix) (verbose) (delete) (only_step)
    {0}._experimental_fork_checkpoint: (model) (from_model) (from_project) (from_s3_bucket) (not_after_step) (verbose) (prefix)
"""

COVERED: dict[str, str] = {
    f"{_ROLLOUTS}every_field_of_a_trajectory": """
        art.Trajectory .messages_and_choices .tools .additional_histories .reward .initial_policy_version
        .final_policy_version .metrics .metadata .logs .start_time .log .track_duration .finish .messages .for_logging
        art.Trajectory.log: (message) art.Trajectory.track_duration: (metric_name) art.trajectories.History .messages_and_choices .tools .messages
        art.MessagesAndChoices
    """,
    f"{_ROLLOUTS}every_field_of_a_group": """
        art.TrajectoryGroup .trajectories .exceptions .metadata .metrics .logs .log art.TrajectoryGroup.log: (message)
        art.trajectories.PydanticException .type .message .traceback
    """,
    f"{_ROLLOUTS}older_names_of_types": """
        art.trajectories.LegacyHistory .messages_and_choices .tools .messages
        art.trajectories.get_messages (messages_and_choices) art.trajectories.MetadataValue
        art.types.Message art.types.MessageOrChoice art.LocalTrainResult art.TrainResult .step .metrics
    """,
    f"{_ROLLOUTS}every_keyword_of_a_gather": """
        art.gather_trajectory_groups (groups) (pbar_desc) (pbar_total_completion_tokens) (max_exceptions) (max_metrics)
        (after_each) art.gather_trajectories (trajectories) (pbar_desc) (pbar_total_completion_tokens) (max_exceptions)
    """,
    f"{_ROLLOUTS}every_keyword_of_batches": """
        art.trajectory_group_batches (groups) (batch_size) (max_batch_exceptions) (max_concurrent_batches) (skip_batches)
        (pbar_desc) (pbar_total_completion_tokens)
    """,
    f"{_ROLLOUTS}a_gather_of_ones_own": """
        art.gather.GatherContext .pbar .max_metrics .pbar_total_completion_tokens .max_exceptions
        art.gather.set_gather_context (context) art.gather.get_gather_context art.gather.wrap_group_awaitable (awaitable)
        art.gather.wrap_trajectories_awaitable (awaitable)
    """,
    f"{_ROLLOUTS}captures_by_all_their_names": """
        art.trajectory (coroutine) art.capture_auto_trajectory (coroutine) art.trajectory_group (trajectories) (exceptions)
        (metadata) (metrics) (logs) (return_exceptions)
    """,
    "plugins/compat/tests/test_capturing.py::test_the_object_inside_the_coroutine_is_the_one_that_is_filled": (
        "art.auto_trajectory (required)"
    ),
    "plugins/compat/tests/test_capturing.py::test_outside_of_a_scope_there_is_no_trajectory": (
        "art.current_trajectory (require)"
    ),
    "plugins/compat/tests/test_capturing.py::test_no_capture_hides_a_judge": "art.no_capture",
    f"{_NAMES}a_trajectory_is_yielded_from_inside": """
        art.yield_trajectory (trajectory) art.capture_yielded_trajectory (coroutine)
    """,
    f"{_ROLLOUTS}a_teacher_s_answer_guides_the_student": """
        art.guided_completion.freeze_tool_schema (tool) (fixed_args)
        art.guided_completion.get_guided_completion_params (completion) (base_tools)
    """,
    f"{_MODELS}every_field_of_a_prompted_model": """
        art.Messages
        art.Model .name .project .entity .id .run_id .config .trainable .inference_api_key .inference_base_url
        .inference_model_name .base_path .report_metrics .register .backend .get_inference_name .openai_client .get_step .log
        .litellm_completion_params art.Model.register: (backend) art.Model.get_inference_name: (step)
        art.Model.log: (trajectories) (split) (metrics) (step) art.Model.litellm_completion_params: (step)
        art.Backend (base_url)
    """,
    f"{_MODELS}every_call_of_a_trained_model": """
        art.TrainableModel .base_model .run_name .trainable ._internal_config .register .get_step .train .delete_checkpoints
        art.TrainableModel.register: (backend) (_openai_client_config)
        art.TrainableModel.train: (trajectory_groups) (config) (_config) (verbose)
        art.TrainableModel.delete_checkpoints: (best_checkpoint_metric) art.TrainConfig art.dev.TrainConfig
        art.dev.InternalModelConfig art.dev.TrainerArgs art.dev.OpenAIServerConfig art.dev.ServerArgs art.Backend: .close
    """,
    f"{_MODELS}backends_train_by_keyword": """
        art.Backend: .register .train art.Backend.register: (model) art.Backend.train: (model) (trajectory_groups)
        art.local.LocalBackend: .train .register art.local.LocalBackend.register: (model)
        art.local.LocalBackend.train: (model) (trajectory_groups) (verbose) art.ServerlessBackend.train: (verbose)
    """,
    f"{_MODELS}supervised_training_by_keyword": """
        art.TrainableModel: .train_sft art.TrainableModel.train_sft: (trajectories) (config) (_config) (verbose) (log_metrics)
        art.TrainSFTConfig art.dev.TrainSFTConfig art.utils.sft.train_sft_from_file (model) (file_path) (epochs) (batch_size)
        (peak_lr) (schedule_type) (warmup_ratio) (initial_step) (final_step) (_config) (verbose) (shuffle_buffer_size)
        (log_metrics) (assistant_turns)
    """,
    f"{_MODELS}a_local_backend_takes_arts_arguments": (
        "art.local.LocalBackend (in_process) (path) (gpu_cost_per_hour_usd) (enable_expert_replay)"
    ),
    "tests/quick/client/test_local.py::test_server_starts_with_the_first_model_and_stops_with_close": (
        "art.local.LocalBackend: .close .register"
    ),
    "plugins/skypilot/tests/test_skypilot.py::test_cluster_is_launched_reached_and_given_back": """
        art.skypilot.SkyPilotBackend: .register .down
        art.skypilot.SkyPilotBackend.initialize_cluster: (cluster_name) (gpu)
    """,
    "plugins/skypilot/tests/test_skypilot.py::test_state_is_reported_while_the_server_gets_ready": """
        art.skypilot.SkyPilotBackend .initialize_cluster art.skypilot.SkyPilotBackend.initialize_cluster: (tail_logs)
    """,
    "plugins/skypilot/tests/test_skypilot.py::test_close_leaves_the_cluster_and_the_next_program_takes_it_up": """
        art.skypilot.SkyPilotBackend.register: (model)
    """,
    "plugins/skypilot/tests/test_skypilot.py::test_variables_of_the_file_are_secrets_of_the_task": """
        art.skypilot.SkyPilotBackend.initialize_cluster: (env_path)
    """,
    "plugins/skypilot/tests/test_skypilot.py::test_force_restart_ends_the_server_that_runs": """
        art.skypilot.SkyPilotBackend.initialize_cluster: (force_restart)
    """,
    "plugins/skypilot/tests/test_skypilot.py::test_resources_replace_what_the_task_asks_for": """
        art.skypilot.SkyPilotBackend.initialize_cluster: (resources)
    """,
    "plugins/skypilot/tests/test_skypilot.py::test_version_that_is_no_checkout_is_reported_once": """
        art.skypilot.SkyPilotBackend.initialize_cluster: (art_version)
    """,
    "plugins/compat/tests/test_compat_settings.py::test_settings_of_a_registration": """
        art.dev.EngineArgs art.dev.InitArgs art.dev.PeftArgs art.dev.TorchtuneArgs
    """,
    "plugins/compat/tests/test_compat.py::test_an_adapter_has_the_names_of_peft_too": (
        "art.LoRAConfig art.TrainableModel: .lora_config"
    ),
    "plugins/compat/tests/test_compat_names.py::test_the_serverless_backend_is_a_server_of_ones_own": (
        "art.ServerlessBackend (api_key) (base_url)"
    ),
    f"{_MODELS}metrics_of_a_step_are_written_with_the_next_log": """
        art.Model: .metrics_builder art.Model.metrics_builder: (cost_context) art.metrics.MetricsBuilder: .measure .add_data
        .add_user_timing .add_idle_times .add_metric .add_cost art.metrics.MetricsBuilder.measure: (key)
        art.metrics.MetricsBuilder.add_data: (step_num_scenarios) (step_actor_tokens) (scenario_ids) (step_rollout_tokens)
        art.metrics.MetricsBuilder.add_user_timing: (step_wall_s) (step_actor_s) (step_eval_s) (step_rollout_s)
        art.metrics.MetricsBuilder.add_idle_times: (step_trainer_idle_s) (step_actor_idle_s) (step_rollout_idle_s)
        art.metrics.MetricsBuilder.add_metric: (key) (value) art.metrics.MetricsBuilder.add_cost: (path) (usd)
    """,
    f"{_MODELS}costs_of_judges_are_counted": """
        art.api_costs.track_api_cost (source) (provider) (model_name) (response_getter) (prompt_price_per_million)
        (completion_price_per_million) (cached_prompt_price_per_million) art.api_costs.TokenPricing .prompt_per_million
        .completion_per_million .cached_prompt_per_million art.metrics.MetricsBuilder (cost_context)
        .register_model_pricing .for_cost_context .activate_context .get_active .flush .add_response_cost
        art.metrics.MetricsBuilder.register_model_pricing: (model_name) (prompt_per_million) (completion_per_million)
        (cached_prompt_per_million) art.metrics.MetricsBuilder.for_cost_context: (cost_context)
        art.metrics.MetricsBuilder.add_response_cost: (source) (response) (provider) (model_name)
        (prompt_price_per_million) (completion_price_per_million) (cached_prompt_price_per_million)
    """,
    f"{_MODELS}an_answer_may_state_its_cost": """
        art.metrics.MetricsBuilder: .register_cost_extractor art.metrics.MetricsBuilder.register_cost_extractor: (provider)
        (extractor) art.api_costs.TokenPricing: .cache_creation_per_million .cache_read_per_million
        art.metrics.MetricsBuilder: .activate
    """,
    f"{_MODELS}sums_continue_in_the_next_program": """
        art.Model: .activate_metrics_context art.Model.activate_metrics_context: (cost_context) art.metrics.MetricsBuilder:
        .state_dict .load_state_dict art.metrics.MetricsBuilder.load_state_dict: (state)
    """,
    f"{_MODELS}every_keyword_of_a_judge": """
        art.rewards.ruler (message_lists) (judge_model) (extra_litellm_params) (rubric) (tools) (debug)
        art.rewards.ruler.TrajectoryScore .trajectory_id .explanation .score art.rewards.ruler.DEFAULT_RUBRIC
        art.rewards.ruler_score_group (group) (judge_model) (extra_litellm_params) (rubric) (swallow_exceptions) (debug)
        art.Tools
    """,
    f"{_MODELS}agents_of_langgraph": """
        art.langgraph.init_chat_model (model) (model_provider) art.langgraph.wrap_rollout (model) (fn)
    """,
    "tests/quick/client/test_retrying.py::test_sync_function_is_called_again_after_each_failure": (
        "art.retry (max_attempts) (delay) (backoff_factor) (exceptions) (on_retry)"
    ),
    f"{_TOOLS}every_keyword_of_iterate_dataset": """
        art.utils.iterate_dataset (dataset) (groups_per_step) (num_epochs) (initial_step) (use_tqdm)
        art.utils.iterate_dataset.DatasetBatch .items .step .epoch .epoch_step
    """,
    f"{_NAMES}calls_are_limited_for_each_key": "art.utils.limit_concurrency (n) (derive_key)",
    f"{_SFT}schedules_by_hand": "art.utils.sft.create_lr_schedule (total_steps) (peak_lr) (method) (warmup_steps) (min_lr)",
    f"{_SFT}a_file_is_read_in_an_order_that_the_seed_fixes": """
        art.utils.sft.get_file_row_count (file_path) art.utils.sft.iterate_file (file_path) (epochs) (shuffle_buffer_size)
        (seed) (initial_skip)
    """,
    f"{_TOOLS}every_keyword_of_supervised_data": """
        art.utils.sft.create_sft_dataset_iterator (trajectories) (chunk_size) (epochs) (batch_size) (peak_lr) (schedule_type)
        (warmup_ratio) (shuffle) (seed) (initial_step) (show_progress) art.utils.sft.SFTChunk .step .epoch .epoch_step
        .trajectories .config
    """,
    f"{_TOOLS}folders_of_a_model": """
        art.utils.get_repo_root_path.get_repo_root_path art.utils.output_dirs.get_default_art_path
        art.utils.output_dirs.get_models_dir (project_name) (art_path) art.utils.output_dirs.get_model_dir (model) (art_path)
        art.utils.output_dirs.get_output_dir_from_model_properties (project) (name) (art_path)
        art.utils.output_dirs.get_trajectories_dir (model_output_dir)
        art.utils.output_dirs.get_trajectories_split_dir (model_output_dir) (split)
        art.utils.output_dirs.get_step_checkpoint_dir (model_output_dir) (step) art.utils.get_model_step (model) (art_path)
    """,
    f"{_TOOLS}a_model_s_folder_comes_from_a_bucket": """
        art.utils.s3.pull_model_from_s3 (model_name) (project) (step) (s3_bucket) (prefix) (verbose) (delete) (art_path)
        (exclude)
    """,
    f"{_TOOLS}rollouts_come_from_a_bucket": """
        art.utils.benchmarking.load_trajectories.pull_model_trajectories (model)
        art.utils.benchmarking.pull_model_trajectories.pull_model_trajectories (model)
    """,
    f"{_TOOLS}groups_as_texts_and_files": """
        art.utils.trajectory_logging.serialize_trajectory_groups (trajectory_groups)
        art.utils.trajectory_logging.deserialize_trajectory_groups (serialized)
        art.utils.trajectory_logging.trajectory_group_to_dict (trajectory_group)
        art.utils.trajectory_logging.trajectory_to_dict (trajectory)
        art.utils.trajectory_logging.write_trajectory_groups_parquet (trajectory_groups) (path)
        art.utils.trajectory_logging.read_trajectory_groups_parquet (path)
    """,
    f"{_TOOLS}tables_and_charts_by_keyword": """
        art.utils.benchmarking.load_trajectories.load_trajectories (project_name) (models) (debug) (art_path)
        art.utils.benchmarking.aggregate_trajectories.load_aggregated_trajectories (project_name) (models) (metrics)
        (art_path) art.utils.benchmarking.aggregate_trajectories.load_latest_metrics (project_name) (models) (split)
        (metrics) (art_path) art.utils.benchmarking.types.BenchmarkModelKey (name) (display_name) (split)
        art.utils.benchmarking.filter_model_split.filter_rename_model_split (df) (models)
        art.utils.benchmarking.charts.training_progress_chart (df) (metric_name) (models) (title) (x_label) (y_label)
        (perfect_score) (legend_loc) art.utils.benchmarking.charts.percentage_comparison_bar_chart (df) (metric_name)
        (models) (title) (y_label) (perfect_score) (num_decimals)
    """,
    f"{_TOOLS}lines_for_notebooks": """
        art.utils.logging.info (msg) art.utils.logging.step (msg) art.utils.logging.ok (msg) art.utils.logging.warn (msg)
        art.utils.logging.err (msg) art.utils.logging.dim (msg)
    """,
    f"{_TOOLS}answers_of_other_libraries": """
        art.utils.litellm.convert_litellm_choice_to_openai (litellm_choice) art.utils.strip_logprobs.strip_logprobs (obj)
        art.utils.get_trajectory_messages.get_trajectory_messages (trajectory)
    """,
    f"{_TOOLS}every_name_of_scenarios": """
        art.mcp.MCPTool .name .description .parameters .from_dict .to_dict art.mcp.MCPTool.from_dict: (data)
        art.mcp.MCPResource .uri .name .description .mime_type .from_dict .to_dict art.mcp.MCPResource.from_dict: (data)
        art.mcp.GeneratedScenario .task .difficulty .from_dict .to_dict .preview art.mcp.GeneratedScenario.from_dict: (data)
        art.mcp.GeneratedScenario.preview: (max_length) art.mcp.GeneratedScenarioCollection (scenarios) .from_dicts .from_json
        .to_dicts .to_json .shuffle .split .filter_by_difficulty .get_difficulty_distribution .preview
        .print_difficulty_distribution .get_summary art.mcp.GeneratedScenarioCollection.from_dicts: (data)
        art.mcp.GeneratedScenarioCollection.from_json: (json_str) art.mcp.GeneratedScenarioCollection.to_json: (indent)
        art.mcp.GeneratedScenarioCollection.split: (train_size)
        art.mcp.GeneratedScenarioCollection.filter_by_difficulty: (min_difficulty) (max_difficulty)
        art.mcp.GeneratedScenarioCollection.preview: (n) (max_task_length)
        art.mcp.generate_scenarios.preview_scenarios (scenarios) (n)
    """,
    "plugins/compat/tests/test_mcp.py::test_the_model_is_asked_until_there_are_enough_different_scenarios": """
        art.mcp.generate_scenarios (tools) (resources) (num_scenarios) (show_preview) (custom_instructions) (generator_model)
        (generator_api_key) (generator_base_url)
    """,
    "plugins/compat/tests/test_buckets.py::test_every_keyword_of_buckets_and_forks": f"""
        art.Backend: {_BUCKETS.format("art.Backend")} art.local.LocalBackend: ._experimental_pull_model_checkpoint
        {_BUCKETS.format("art.local.LocalBackend")} art.local.LocalBackend._experimental_pull_from_s3: (exclude) (latest_only)
        (step) art.local.LocalBackend._experimental_pull_model_checkpoint: (model) (step) (local_path) (s3_bucket) (prefix)
        (verbose) art.ServerlessBackend: ._experimental_pull_model_checkpoint
        art.ServerlessBackend._experimental_pull_model_checkpoint: (model) (step) (local_path) (verbose)
    """,
    "plugins/compat/tests/test_pipeline.py::test_a_pipeline_of_single_rollouts": """
        art.pipeline_trainer.PipelineTrainer (model) (backend) (rollout_fn) (scenarios) (config) (eval_fn) (max_steps_off_policy)
        (eval_every_n_steps) (max_steps) .train art.pipeline_trainer.make_group_rollout_fn (single_rollout_fn) (n)
    """,
    "plugins/compat/tests/test_paths.py::test_names_of_arts_modules_are_there": """
        art.backend.AnyModel art.backend.AnyTrainableModel
    """,
}
"""Each test with the names that it calls for their effect; `covered` in `plugins/compat/scripts/compatibility` reads it."""
