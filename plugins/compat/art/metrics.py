"""ART's `art.metrics`: numbers of a step that no trajectory has, such as timings and the costs of judges.

    builder = model.metrics_builder("eval")
    builder.register_model_pricing("openai/gpt-4.1", prompt_per_million=2.0, completion_per_million=8.0)
    with builder.activate_context():
        await run_judge(...)          # decorated with track_api_cost
    await model.log(groups, "val")    # writes the numbers

Prices of vendors are not built in. Sums over a run ("data/cum/...") continue from the history of a model without a server;
with a server they begin at zero with each program.
"""

import functools
import inspect
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Self, TypeVar, cast

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

SUMMED = ("costs/", "time/", "data/")
"""Sections whose metrics also get a sum over the run."""


@dataclass(frozen=True, slots=True)
class TokenPricing:
    """US dollars for a million tokens. Where a price is None, the price of prompt tokens applies. OpenAI counts cached tokens
    among the prompt tokens; `cached_prompt_per_million` is their price. Anthropic counts cached tokens separately;
    `cache_creation_per_million` and `cache_read_per_million` are their prices."""

    prompt_per_million: float
    completion_per_million: float
    cached_prompt_per_million: float | None = None
    cache_creation_per_million: float | None = None
    cache_read_per_million: float | None = None

    def cost_of(self, usage: Any) -> float:
        """The cost of an answer of OpenAI's or Anthropic's API, from its `usage`."""
        details = _field(usage, "prompt_tokens_details") or _field(usage, "input_tokens_details")
        cached = _number(details, "cached_tokens")
        prompt = _number(usage, "prompt_tokens", "input_tokens") - cached
        completion = _number(usage, "completion_tokens", "output_tokens")
        cost = prompt * self.prompt_per_million + completion * self.completion_per_million
        for count, price in (
            (cached, self.cached_prompt_per_million),
            (_number(usage, "cache_creation_input_tokens"), self.cache_creation_per_million),
            (_number(usage, "cache_read_input_tokens"), self.cache_read_per_million),
        ):
            cost += count * (self.prompt_per_million if price is None else price)
        return cost / 1e6


@dataclass(slots=True)
class _Run:
    """What the builders of one model share."""

    pending: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    """The metrics since the last `flush`, by context."""
    scenarios: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    seen: set[str] = field(default_factory=set[str])
    totals: dict[str, float] = field(default_factory=dict[str, float])
    prices: dict[str, TokenPricing] = field(default_factory=dict[str, TokenPricing])
    extractors: dict[str, Callable[[Any], float | None]] = field(
        default_factory=dict[str, Callable[[Any], float | None]]
    )


class MetricsBuilder:
    """Collects metrics of a context: "train", "eval", or a split. `Model.metrics_builder` makes a builder."""

    def __init__(self, cost_context: str, _run: _Run | None = None) -> None:
        self.cost_context = cost_context
        self._run = _run or _Run()

    def for_cost_context(self, cost_context: str) -> "MetricsBuilder":
        """The same run's builder of another context."""
        return MetricsBuilder(cost_context, self._run)

    def add_metric(self, key: str, value: float) -> None:
        """Adds to a metric of the next step, such as "time/step_judge_s".

        Raises:
            ValueError: the key has no section, or is a sum over the run; the source of a cost is also the beginning of
                another source; or the value is not finite, so that the sum would never be finite again.
        """
        if not math.isfinite(value):
            raise ValueError(f"{key!r} must be a finite number, not {value!r}")
        section, slash, name = key.partition("/")
        if not slash or name.startswith("cum/"):
            raise ValueError(
                f"{key!r} is no metric's key: it has a section, such as 'data/tokens', and the builder makes 'data/cum/...'"
            )
        metrics = self._run.pending[self.cost_context]
        for known in metrics if section == "costs" else ():
            if known.startswith(f"{key}/") or key.startswith(f"{known}/"):
                raise ValueError(f"{key!r} and {known!r}: a source of costs has no sources below it")
        metrics[key] = metrics.get(key, 0.0) + float(value)

    def add_cost(self, path: str, usd: float) -> None:
        self.add_metric(f"costs/{path}", usd)

    def add_data(self, *, scenario_ids: Iterable[str] | None = None, **sizes: float | None) -> None:
        """Adds "data/NAME" for each size: step_num_scenarios, step_actor_tokens, step_rollout_tokens. `scenario_ids` become
        "data/cum/num_unique_scenarios"."""
        self._add("data", sizes)
        self._run.scenarios[self.cost_context] |= {str(scenario_id) for scenario_id in scenario_ids or ()}

    def add_user_timing(self, **seconds: float | None) -> None:
        """Adds "time/NAME" for each argument: step_wall_s, step_actor_s, step_rollout_s, step_eval_s."""
        self._add("time", seconds)

    def add_idle_times(self, **seconds: float | None) -> None:
        """Adds "throughput/NAME" for each argument: step_trainer_idle_s, step_actor_idle_s, step_rollout_idle_s."""
        self._add("throughput", seconds)

    @contextmanager
    def measure(self, key: str) -> Generator[None, None, None]:
        """Adds the seconds spent in the `with` block."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.add_metric(key, time.monotonic() - started)

    def register_model_pricing(self, model_name: str, **prices: float) -> None:
        """Sets a model's price for `track_api_cost`, with the fields of `TokenPricing`."""
        self._run.prices[model_name] = TokenPricing(**prices)

    def register_cost_extractor(self, provider: str, extractor: Callable[[Any], float | None]) -> None:
        """Sets the function that reads the cost in US dollars from a provider's answers. Where the function returns None, the
        cost comes from the answer itself or from the price."""
        self._run.extractors[provider] = extractor

    def add_response_cost(
        self, source: str, response: Any, *, provider: str, model_name: str, **prices: float | None
    ) -> float | None:
        """Adds the cost of an answer and returns the cost. The cost comes from the provider's extractor, else from the answer
        itself, else from the price. With none of the three, the result is None, and a warning is logged. `prices` are as in
        `track_api_cost`."""
        extractor = self._run.extractors.get(provider)
        cost = extractor(response) if extractor is not None else None
        if cost is None:
            cost = self._cost(response, model_name, provider, prices)
        if cost is not None:
            self.add_cost(f"{self.cost_context}/{source.strip('/')}", cost)
        return cost

    def activate(self) -> "Token[MetricsBuilder]":
        """Makes this builder the active one, until `token.var.reset(token)`. `activate_context` does so for a `with` block."""
        return _active.set(self)

    @contextmanager
    def activate_context(self) -> Generator[Self, None, None]:
        """Functions with `track_api_cost` add to this builder inside the `with` block."""
        token = self.activate()
        try:
            yield self
        finally:
            _active.reset(token)

    @staticmethod
    def get_active() -> "MetricsBuilder":
        """The builder of the `with` block; LookupError outside."""
        return _active.get()

    async def flush(self) -> dict[str, float]:
        """The metrics of this context since the last `flush`, with sums: of costs by source, and over the run."""
        return self._flush()

    def take(self, more: Mapping[str, float]) -> tuple[dict[str, float], Callable[[], None]]:
        """The metrics of `flush` with `more` added, and a function that puts all of them back, for a row that cannot be
        written. Raises ValueError as `add_metric` does."""
        run, context = self._run, self.cost_context
        collected = dict(run.pending.get(context, {}))
        scenarios, before = set(run.scenarios.get(context, ())), dict(run.totals)
        try:
            for key, value in more.items():
                self.add_metric(key, value)
        except ValueError:
            run.pending[context] = collected
            raise
        metrics = self._flush()
        added = {key: value - before.get(key, 0.0) for key, value in run.totals.items()}

        def undo() -> None:
            for key, value in collected.items():
                self.add_metric(key, value)
            run.scenarios[context] |= scenarios
            for key, value in added.items():
                run.totals[key] -= value

        return metrics, undo

    def _flush(self) -> dict[str, float]:
        metrics = self._run.pending.pop(self.cost_context, {})
        costs = {key: value for key, value in metrics.items() if key.startswith("costs/")}
        for key, value in costs.items():
            parts = key.split("/")
            for parent in ("/".join(parts[:end]) for end in range(2, len(parts))):
                metrics[parent] = metrics.get(parent, 0.0) + value
        if costs:
            metrics["costs/all"] = sum(costs.values())
        for key, value in list(metrics.items()):
            section, _, name = key.partition("/")
            if key.startswith((*SUMMED, "throughput/step_")):
                total = f"{section}/cum/{name.removeprefix('step_')}"
                metrics[total] = self._run.totals[total] = self._run.totals.get(total, 0.0) + value
        for part in ("trainer", "actor"):
            seconds, tokens = f"time/cum/{part}_s", f"data/cum/{part}_tokens"
            totals = self._run.totals
            if metrics.keys() & {seconds, tokens} and totals.get(seconds) and tokens in totals:
                metrics[f"throughput/avg_{part}_tok_per_s"] = totals[tokens] / totals[seconds]
        if scenarios := self._run.scenarios.pop(self.cost_context, None):
            self._run.seen |= scenarios
            metrics["data/cum/num_unique_scenarios"] = float(len(self._run.seen))
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """The sums over the run and the ids of scenarios, as JSON values, for the `load_state_dict` of a later program."""
        return {"totals": dict(self._run.totals), "scenarios": sorted(self._run.seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state_dict`, also for the builders of other contexts."""
        self._run.totals = dict(state["totals"])
        self._run.seen = set(state["scenarios"])

    def _cost(self, response: Any, model_name: str, provider: str, prices: dict[str, float | None]) -> float | None:
        usage = _field(response, "usage")
        stated = (_field(usage, "cost"), _field(_field(usage, "model_extra"), "cost"))
        if (cost := next((amount for amount in stated if amount is not None), None)) is not None:
            return float(cost)
        fields = {name.replace("_price", ""): value for name, value in prices.items() if value is not None}
        price = TokenPricing(**fields) if fields else self._run.prices.get(model_name)
        if price is not None and usage is not None:
            return price.cost_of(usage)
        reason = "the answer has no usage" if usage is None else "register_model_pricing sets its price"
        logger.warning("the cost of '%s' (%s) is not counted: %s", model_name, provider, reason)
        return None

    def _add(self, section: str, values: dict[str, float | None]) -> None:
        for name, value in values.items():
            if value is not None:
                self.add_metric(f"{section}/{name}", value)


_active: ContextVar[MetricsBuilder] = ContextVar("_active")


def track_api_cost(
    *,
    source: str,
    provider: str,
    model_name: str,
    response_getter: Callable[[Any], Any] = lambda result: result,
    **prices: float | None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator that adds the cost of a function's answer to the active builder, as "costs/CONTEXT/SOURCE". Without an
    active builder the function runs unchanged. `response_getter` takes the answer out of the function's result. `prices` are
    the fields of `TokenPricing`: prompt_price_per_million, completion_price_per_million and so on."""

    def add(result: R) -> R:
        if (builder := _active.get(None)) is not None:
            response = response_getter(result)
            builder.add_response_cost(source, response, provider=provider, model_name=model_name, **prices)
        return result

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        async def call_async(*args: P.args, **kwargs: P.kwargs) -> Any:
            return add(await cast(Any, function(*args, **kwargs)))

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return add(function(*args, **kwargs))

        chosen = call_async if inspect.iscoroutinefunction(function) else call
        return cast(Callable[P, R], functools.wraps(function)(chosen))

    return decorate


def _field(holder: Any, name: str) -> Any:
    """A field of an answer, which is an object or a dictionary."""
    if isinstance(holder, Mapping):
        return cast("Mapping[str, Any]", holder).get(name)
    return getattr(holder, name, None)


def _number(usage: Any, *names: str) -> int:
    """The first of these fields that is not 0; OpenAI's and Anthropic's APIs name the same number differently."""
    return next((value for name in names if (value := _field(usage, name))), 0)
