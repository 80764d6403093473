"""ART's names and keywords of models, backends and train calls, each called for its effect."""

import json
import logging
import math
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import art
from art.api_costs import TokenPricing  # type: ignore[import]  # an alias
from art.langgraph import init_chat_model, wrap_rollout
from art.metrics import MetricsBuilder, track_api_cost  # type: ignore[import]  # an alias
from art.rewards import ruler, ruler_score_group
from art.rewards.ruler import DEFAULT_RUBRIC, TrajectoryScore
from art.utils.sft import train_sft_from_file

pytestmark = pytest.mark.anyio

TRAIN = "/api/models/demo/agent/train"
LOG = "/api/models/demo/agent/log"
CHAT = "/v1/chat/completions"


def done(answer: Any, step: int = 4) -> Any:
    return answer(lines=[{"event": "done", "job_id": "j", "step": step, "metrics": {"loss/train": 0.5}}])


def last(server: Any, path: str) -> dict[str, Any]:
    return server.sent("POST", path)[-1].json()


# --- models -----------------------------------------------------------------------------------------------------------


async def test_every_field_of_a_prompted_model(server: Any, answer: Any, tmp_path: Path) -> None:
    server.on("POST", CHAT, answer(body={"choices": [{"message": {"role": "assistant", "content": "y"}}]}))
    model = art.Model(
        name="judge",
        project="p",
        entity="e",
        id="1",
        run_id="2",
        config={"depth": 3},
        trainable=False,
        inference_api_key="key",
        inference_base_url=f"{server.url}/v1",
        inference_model_name="vendor/gpt",
        base_path=str(tmp_path),
        report_metrics=["val/reward"],
    )
    async with art.Backend(base_url=server.url) as backend:
        await model.register(backend=backend)
        assert model.backend() is backend and not model.trainable
    name = model.get_inference_name()
    assert name == "vendor/gpt" and model.get_inference_name(step=2) == "vendor/gpt@2"
    messages: art.Messages = [{"role": "user", "content": "hi"}]
    await model.openai_client().chat.completions.create(model=name, messages=messages)
    (request,) = server.sent("POST", CHAT)
    assert request.headers["authorization"] == "Bearer key" and request.json()["model"] == name
    await model.close()
    assert model.config == {"depth": 3} and await model.get_step() == 0
    group = art.TrajectoryGroup([art.Trajectory(reward=0.5)])
    written = await model.log(trajectories=[group], split="test", metrics={"cost": 1.0}, step=2)
    assert written["test/cost"] == 1.0 and written["test/reward"] == 0.5
    (row,) = (tmp_path / "p/models/judge/history.jsonl").read_text().splitlines()
    assert json.loads(row)["step"] == 2
    params = model.litellm_completion_params(step=2)
    assert (params["model"], params["api_key"]) == ("vendor/gpt@2", "key")
    kept = (model.entity, model.id, model.run_id, model.report_metrics, model.project)
    assert kept == ("e", "1", "2", ["val/reward"], "p")


async def test_every_call_of_a_trained_model(
    server: Any, answer: Any, groups: list[art.TrajectoryGroup], caplog: pytest.LogCaptureFixture
) -> None:
    for path in ("agent-1", "agent"):
        server.on("POST", f"/api/models/demo/{path}/train", done(answer))
    server.on("GET", "/api/models/demo/agent-1", answer(body={**INFO, "step": 7}))
    deleted = "/api/models/demo/agent-1/checkpoints/delete"
    server.on("POST", deleted, answer(body={"kept": [7], "deleted": [1]}))
    settings = art.dev.InternalModelConfig(trainer_args=art.dev.TrainerArgs(max_grad_norm=0.25))
    model = art.TrainableModel(
        name="agent",
        run_name="agent-1",
        project="demo",
        base_model="art/tiny",
        _internal_config=settings,
    )
    assert model.trainable
    async with art.Backend(base_url=server.url) as backend:
        await model.register(
            backend=backend,
            _openai_client_config=art.dev.OpenAIServerConfig(server_args=art.dev.ServerArgs(api_key="x")),
        )
        assert "_openai_client_config is ignored" in caplog.text
        assert last(server, "/api/models")["name"] == "agent-1" and await model.get_step() == 7
        assert last(server, "/api/models")["base_model"] == "art/tiny"
        result = await model.train(
            trajectory_groups=groups,
            config=art.TrainConfig(learning_rate=1e-4, beta=0.25),
            _config=art.dev.TrainConfig(allow_training_without_logprobs=True),
            verbose=True,
        )
        config = last(server, "/api/models/demo/agent-1/train")["config"]
        assert result.step == 4 and (config["learning_rate"], config["beta"]) == (1e-4, 0.25)
        assert config["allow_training_without_logprobs"] and config["max_grad_norm"] == 0.25
        await model.delete_checkpoints(best_checkpoint_metric="val/won")
        assert last(server, deleted)["best_metric"] == "val/won"
        await backend.close()


INFO = {
    "name": "agent-1",
    "project": "demo",
    "base_model": "art/tiny",
    "inference_name": "demo/agent-1",
    "lora": {},
}


async def test_backends_train_by_keyword(
    server: Any, answer: Any, groups: list[art.TrajectoryGroup], capsys: pytest.CaptureFixture[str]
) -> None:
    server.on("POST", TRAIN, done(answer, 5))
    model = art.TrainableModel(name="agent", project="demo", base_model="art/tiny")
    async with art.Backend(base_url=server.url) as backend:
        await backend.register(model=model)
        result = await backend.train(model=model, trajectory_groups=groups, verbose=True)
        assert isinstance(result, art.TrainResult) and result.step == 5
    assert len(last(server, TRAIN)["groups"]) == 1 and "train" in capsys.readouterr().err


async def test_supervised_training_by_keyword(
    server: Any,
    answer: Any,
    model: art.TrainableModel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.on("POST", TRAIN, lambda _: done(answer))
    message: Any = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    await model.train_sft(
        trajectories=[art.Trajectory(messages_and_choices=message)] * 2,
        config=art.TrainSFTConfig(learning_rate=1e-4, batch_size=1, assistant_turns="last"),
        _config=art.dev.TrainSFTConfig(metric_logging="step"),
        verbose=True,
        log_metrics=True,
    )
    body = last(server, TRAIN)
    assert (body["config"]["learning_rate"], body["config"]["batch_size"]) == (1e-4, 1)
    assert body["groups"][0]["trajectories"][0]["turn_advantages"] == [1.0]
    assert "train" in capsys.readouterr().err
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"messages": message}) + "\n" for _ in range(4)))
    await train_sft_from_file(
        model=model,
        file_path=str(file),
        epochs=2,
        batch_size=2,
        peak_lr=1.0,
        schedule_type="constant",
        warmup_ratio=0.5,
        initial_step=1,
        final_step=3,
        _config=None,
        verbose=False,
        shuffle_buffer_size=1,
        log_metrics=False,
        assistant_turns="last",
    )
    body = last(server, TRAIN)
    assert body["config"]["learning_rate"] == [1.0, 1.0] and len(body["groups"]) == 4, (
        "half of the four steps warm up: 0.5 and 1.0"
    )


def test_a_local_backend_takes_arts_arguments(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = str(tmp_path / "here")
    with art.LocalBackend(in_process=True, path=path, enable_expert_replay=False) as backend:
        assert backend._location == path and caplog.text == ""
    art.LocalBackend(path=path, gpu_cost_per_hour_usd=2.25)
    assert "gpu_cost_per_hour_usd has no effect" in caplog.text


# --- metrics and costs ------------------------------------------------------------------------------------------------


async def test_metrics_of_a_step_are_written_with_the_next_log(
    server: Any, answer: Any, model: art.TrainableModel
) -> None:
    server.on("POST", LOG, answer(body={"step": 3, "metrics": {}}))
    builder = model.metrics_builder(cost_context="train")
    with builder.measure(key="time/step_judge_s"):
        pass
    builder.add_data(step_num_scenarios=2, step_actor_tokens=90, scenario_ids=["a", "b"])
    builder.add_data(step_rollout_tokens=10)
    builder.add_user_timing(step_wall_s=2.0, step_actor_s=1.0, step_eval_s=0.5, step_rollout_s=0.1)
    builder.add_idle_times(step_trainer_idle_s=0.25, step_actor_idle_s=0.75, step_rollout_idle_s=0.1)
    builder.add_metric(key="data/step_retries", value=1)
    builder.add_metric(key="data/step_retries", value=2)
    builder.add_cost(path="gpu", usd=3.0)
    with pytest.raises(ValueError, match="'retries'"):
        builder.add_metric("retries", 1)
    await model.log(split="val")
    assert last(server, LOG)["metrics"] == {}, "those of training wait for its log"
    await model.log(split="train", metrics={"data/step_retries": 7.0})
    sent = last(server, LOG)["metrics"]
    assert sent.pop("time/step_judge_s") >= 0 and sent.pop("time/cum/judge_s") >= 0
    assert sent["data/step_retries"] == sent["data/cum/retries"] == 10.0, "a given metric is added"
    assert sent["throughput/cum/trainer_idle_s"] == 0.25
    assert sent["throughput/avg_actor_tok_per_s"] == 90.0, "by hand: 90 tokens in a second"
    assert sent["data/cum/num_unique_scenarios"] == 2 and sent["data/step_actor_tokens"] == 90
    assert (sent["data/step_num_scenarios"], sent["data/step_rollout_tokens"]) == (2, 10)
    assert (sent["time/step_wall_s"], sent["time/step_actor_s"]) == (2.0, 1.0)
    assert (sent["time/step_eval_s"], sent["time/step_rollout_s"]) == (0.5, 0.1)
    assert [sent[f"throughput/step_{part}_idle_s"] for part in ("trainer", "actor", "rollout")] == [
        0.25,
        0.75,
        0.1,
    ]
    assert sent["costs/gpu"] == sent["costs/all"] == sent["costs/cum/all"] == 3.0
    builder.add_data(step_actor_tokens=10, scenario_ids=["b", "c"])
    await model.log(split="train")
    sent = last(server, LOG)["metrics"]
    assert sent["data/cum/actor_tokens"] == 100 and sent["data/cum/num_unique_scenarios"] == 3
    assert "time/step_wall_s" not in sent


async def test_metrics_of_a_row_that_is_not_written_wait_for_the_next(tmp_path: Path) -> None:
    model = art.Model(name="gpt", project="p", base_path=str(tmp_path))
    builder = model.metrics_builder("eval")
    builder.add_cost("judge", 2.0)
    builder.add_data(scenario_ids=["a"])
    bad, good = art.Trajectory(reward=float("nan")), art.Trajectory(reward=1.0)
    metrics = {"data/step_retries": 3.0}
    with pytest.raises(ValueError, match="reward"):
        await model.log([bad], metrics=metrics)
    builder.add_cost("judge", 0.5)
    with pytest.raises(ValueError, match="costs/judge"):
        await model.log([good], metrics={**metrics, "costs/judge/extra": 1.0})
    with pytest.raises(ValueError, match="data/step_retries"):
        await model.log([good], metrics={"data/step_retries": math.nan})
    with pytest.raises(ValueError, match="costs/judge"):
        builder.add_cost("judge", math.inf)
    row = await model.log([good], metrics=metrics)
    assert row["costs/judge"] == row["costs/cum/judge"] == row["costs/cum/all"] == 2.5
    assert row["data/step_retries"] == row["data/cum/retries"] == 3.0
    assert row["data/cum/num_unique_scenarios"] == 1


def answer_with(prompt: int, completion: int, cached: int = 0) -> SimpleNamespace:
    details = SimpleNamespace(cached_tokens=cached)
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    return SimpleNamespace(usage=SimpleNamespace(**usage, prompt_tokens_details=details))


async def test_costs_of_judges_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    @track_api_cost(
        source="judge/correct",
        provider="openai",
        model_name="gpt",
        response_getter=lambda result: result[1],
    )
    async def judge(text: str) -> tuple[str, Any]:
        return text, answer_with(1_000_000, 500_000, cached=500_000)

    @track_api_cost(
        source="judge/style",
        provider="anthropic",
        model_name="other",
        prompt_price_per_million=1.0,
        completion_price_per_million=4.0,
        cached_prompt_price_per_million=0.0,
    )
    def style() -> Any:
        return SimpleNamespace(usage=SimpleNamespace(input_tokens=1_000_000, output_tokens=250_000))

    builder = MetricsBuilder(cost_context="train")
    builder.register_model_pricing(
        model_name="gpt",
        prompt_per_million=2.0,
        completion_per_million=8.0,
        cached_prompt_per_million=1.0,
    )
    assert await judge("not counted") and style()
    with builder.for_cost_context(cost_context="eval").activate_context() as active:
        assert MetricsBuilder.get_active() is active
        assert (await judge("counted"))[0] == "counted"
        assert style().usage.input_tokens == 1_000_000
    assert await builder.flush() == {}
    costs = await active.flush()
    # By hand: half a million prompt tokens at 2, half at 1, half a million answered at 8; then 1 and a quarter of 4.
    assert costs["costs/eval/judge/correct"] == pytest.approx(0.5 * 2 + 0.5 * 1 + 0.5 * 8)
    assert costs["costs/eval/judge/style"] == pytest.approx(1 + 1)
    assert costs["costs/eval/judge"] == costs["costs/eval"] == costs["costs/all"] == 7.5
    assert costs["costs/cum/all"] == 7.5
    price = TokenPricing(prompt_per_million=1.0, completion_per_million=2.0, cached_prompt_per_million=None)
    assert price.cost_of(answer_with(10, 10, 5).usage) == pytest.approx(3e-5)
    half = TokenPricing(1.0, 2.0, cached_prompt_per_million=0.5)
    responses = {"input_tokens": 10, "output_tokens": 10}
    responses |= {"input_tokens_details": {"cached_tokens": 4}}
    assert half.cost_of(responses) == pytest.approx((6 + 4 * 0.5 + 20) / 1e6)
    asked: dict[str, Any] = {"provider": "openai", "model_name": "unknown"}
    assert active.add_response_cost(source="judge", response=answer_with(1, 1), **asked) is None
    assert "the cost of 'unknown' (openai) is not counted" in caplog.text
    cost = active.add_response_cost(
        source="judge",
        response=answer_with(1_000_000, 0),
        provider="openai",
        model_name="unknown",
        prompt_price_per_million=2.0,
        completion_price_per_million=0.0,
        cached_prompt_price_per_million=None,
    )
    assert cost == 2.0 and (await active.flush())["costs/cum/all"] == 9.5
    with pytest.raises(LookupError):
        MetricsBuilder.get_active()


async def test_an_answer_may_state_its_cost() -> None:
    builder = MetricsBuilder(cost_context="train")
    asked: dict[str, Any] = {
        "provider": "router",
        "model_name": "m",
        "prompt_price_per_million": 1.0,
    }
    asked["completion_price_per_million"] = 1.0
    stated = {"usage": {"prompt_tokens": 9, "completion_tokens": 9, "cost": 0.25}}
    assert builder.add_response_cost("judge", stated, **asked) == 0.25
    extra = {"usage": {"prompt_tokens": 9, "model_extra": {"cost": 0.5}}}
    assert builder.add_response_cost("judge", extra, **asked) == 0.5
    builder.register_cost_extractor(provider="router", extractor=lambda answer: answer["usage"].get("credits"))
    assert builder.add_response_cost("judge", {"usage": {"credits": 2.0}}, **asked) == 2.0
    assert builder.add_response_cost("judge", stated, **asked) == 0.25, "None: as the answer states it"
    # Anthropic counts cached tokens beside the others: 100 at 3, 1,000 written at 3.75, 500 read at 0.3, 50 answered at 15.
    names = (
        "input_tokens",
        "cache_creation_input_tokens",
        "cache_read_input_tokens",
        "output_tokens",
    )
    usage = dict(zip(names, (100, 1_000, 500, 50), strict=True))
    price = TokenPricing(3.0, 15.0, cache_creation_per_million=3.75, cache_read_per_million=0.3)
    assert price.cost_of(usage) == pytest.approx((300 + 3_750 + 150 + 750) / 1e6)
    assert (await builder.flush())["costs/train/judge"] == 3.0
    token = builder.activate()
    assert MetricsBuilder.get_active() is builder
    token.var.reset(token)


async def test_a_source_of_costs_has_no_sources_below_it_and_sums_are_the_builders() -> None:
    builder = MetricsBuilder(cost_context="train")
    builder.add_cost("train/judge/style", 1.0)
    builder.add_cost("train/judges", 1.0)
    for path in ("train/judge", "train/judge/style/long"):
        with pytest.raises(ValueError, match="judge"):
            builder.add_cost(path, 1.0)
    with pytest.raises(ValueError, match="data/cum/"):
        builder.add_metric("data/cum/tokens", 1.0)


async def test_sums_continue_in_the_next_program(tmp_path: Path) -> None:
    def program() -> art.Model:
        return art.Model(name="agent", project="demo", base_path=str(tmp_path))

    await program().log(None, "train", step=1, metrics={"costs/train/gpu": 0.25, "loss": 1.0})
    second = program()
    token = second.activate_metrics_context(cost_context="train")
    MetricsBuilder.get_active().add_cost("train/gpu", 0.5)
    token.var.reset(token)
    own_sums = {"time/cum/own_s": 3.0}
    metrics = await second.log(trajectories=None, split="train", step=2, metrics=own_sums)
    assert metrics["time/cum/own_s"] == 3.0, "a sum of the program's own stays as it is"
    assert metrics["costs/train/gpu"] == 0.5 and metrics["costs/cum/train/gpu"] == 0.75
    first = MetricsBuilder(cost_context="train")
    first.add_data(scenario_ids=["a", "b"], step_actor_tokens=5)
    await first.flush()
    later = MetricsBuilder(cost_context="train")
    later.load_state_dict(state=json.loads(json.dumps(first.state_dict())))
    later.add_data(scenario_ids=["b", "c"], step_actor_tokens=2)
    metrics = await later.for_cost_context("train").flush()
    assert metrics["data/cum/num_unique_scenarios"] == 3 and metrics["data/cum/actor_tokens"] == 7


# --- judges and agents ------------------------------------------------------------------------------------------------


async def test_every_keyword_of_a_judge(
    server: Any, answer: Any, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    scores = {"scores": {"1": {"explanation": "good", "score": 0.75}}}
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": json.dumps(scores)},
    }
    server.on("POST", CHAT, answer(body={"id": "c", "choices": [choice]}))
    params = {"api_base": f"{server.url}/v1", "temperature": 0.5}
    tools: art.Tools = [{"type": "function", "function": {"name": "find"}}]
    (score,) = await ruler(
        message_lists=[[{"role": "user", "content": "q"}]],
        judge_model="vendor/judge",
        extra_litellm_params=params,
        rubric="Be strict.",
        tools=tools,
        debug=True,
    )
    assert isinstance(score, TrajectoryScore)
    assert (score.trajectory_id, score.explanation, score.score) == ("1", "good", 0.75)
    body = last(server, CHAT)
    text = json.dumps(body["messages"])
    assert body["model"] == "vendor/judge" and body["temperature"] == 0.5
    assert "Be strict." in text and "find" in text and "0.75" in capsys.readouterr().err
    group = art.TrajectoryGroup([art.Trajectory(messages_and_choices=[{"role": "user", "content": "q"}])])
    scored = await ruler_score_group(
        group=group,
        judge_model="vendor/judge",
        extra_litellm_params=params,
        rubric=DEFAULT_RUBRIC,
        swallow_exceptions=False,
        debug=True,
    )
    assert scored is not None and scored.trajectories[0].reward == 0.75
    assert DEFAULT_RUBRIC.splitlines()[0] in last(server, CHAT)["messages"][0]["content"]
    server.on("POST", CHAT, answer(400, {"error": {"message": "no"}}))
    assert await ruler_score_group(group, "j", params, swallow_exceptions=True) is None
    assert [record for record in caplog.records if record.levelno == logging.WARNING]


async def test_agents_of_langgraph(
    server: Any, answer: Any, model: art.TrainableModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for `langchain_openai`; tests/long/integration/langgraph_program.py runs the real one."""
    chats: list[dict[str, Any]] = []
    module: Any = types.ModuleType("langchain_openai")
    module.ChatOpenAI = lambda **options: chats.append(options)
    monkeypatch.setitem(sys.modules, "langchain_openai", module)
    history = {"messages_and_choices": [{"role": "user", "content": "hi"}]}
    server.otherwise = lambda _: answer(body={"histories": [history], "num_choices": 1})

    async def agent(question: str) -> art.Trajectory:
        init_chat_model(model="demo/agent@2", model_provider="openai", max_tokens=5)
        return art.Trajectory(reward=0.5, metadata={"question": question})

    trajectory = await wrap_rollout(model=model, fn=agent)("why")
    assert trajectory.reward == 0.5 and trajectory.metadata == {"question": "why"}
    assert trajectory.messages() == history["messages_and_choices"]
    (chat,) = chats
    assert (chat["model"], chat["max_tokens"], chat["temperature"]) == ("demo/agent@2", 5, 1.0)
    assert "/s/" in chat["base_url"] and "model_provider" not in chat
