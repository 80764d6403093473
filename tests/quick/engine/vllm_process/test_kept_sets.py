"""What tokens were sampled from: vLLM's own sampler, with our patches in it, against a formula of its own."""

import importlib
import struct
import uuid
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from art_server.engine.command import engine_environment
from art_server.engine.vllm_process import kept_sets, sampling_payload
from art_server.settings import ServerConfig
from art_server.shared import switches
from art_server.shared.kept_set import pack_set, unpack_set
from art_server.store.base_models import TINY_DIR, BaseModel

V = 1408
BATCH = 6


@pytest.fixture(scope="module")
def vllm() -> Any:
    """vLLM's modules, the runner's changed as in its worker process."""
    names = {
        "runner": "vllm.v1.worker.gpu_model_runner",
        "batch": "vllm.v1.worker.gpu_input_batch",
        "params": "vllm.sampling_params",
        "sampler": "vllm.v1.sample.sampler",
        "metadata": "vllm.v1.sample.metadata",
        "processors": "vllm.v1.sample.logits_processor",
        "outputs": "vllm.v1.outputs",
        "cuts": "vllm.v1.sample.ops.topk_topp_sampler",
        "scheduler": "vllm.v1.core.sched.scheduler",
        "grammar": "vllm.v1.structured_output.utils",
    }
    with warnings.catch_warnings(action="ignore"):  # vLLM's and torch's own deprecations
        modules = SimpleNamespace(**{key: importlib.import_module(n) for key, n in names.items()})
        modules.step = kept_sets.install_in_runner()
        importlib.import_module("torch._dynamo").config.disable = True  # as in our engines on a CPU
    return modules


GRAMMAR = np.array([t % 3 != 0 for t in range(V)])
"""The tokens that the grammar of these tests lets through."""
FEW = np.array([t in (5, 6, 7, 900) for t in range(V)])


def bitmask_of(is_kept: np.ndarray) -> np.ndarray:
    return np.packbits(is_kept, bitorder="little").view(np.int32)


class Batch:
    """A batch of requests in vLLM's own records, and one step of its sampler."""

    def __init__(self, vllm: Any, requests: list[dict[str, Any]], grammars: dict[int, np.ndarray]):
        self._vllm = vllm
        self._grammars = grammars
        cpu = torch.device("cpu")
        config = SimpleNamespace(speculative_config=None, scheduler_config=SimpleNamespace(max_num_seqs=len(requests)))
        processors = vllm.processors.build_logitsprocs(config, cpu, False, False)
        self.input_batch = vllm.batch.InputBatch(len(requests), 64, 64, cpu, V, [16], [4], logitsprocs=processors)
        self.requests: dict[str, Any] = {}
        name = uuid.uuid4().hex
        for number, asked in enumerate(requests):
            ends = asked.pop("ends", [])
            params = vllm.params.SamplingParams(logprobs=0, **asked)
            params._bad_words_token_ids = [[9], [1, 11]] if asked.get("bad_words") else None
            params._all_stop_token_ids.update(ends)
            state = vllm.batch.CachedRequestState(f"{name}-{number}", [1, 2], [], params, None, ([0],), 2, [])
            self.requests[state.req_id] = state
            self.input_batch.add_request(state)
        self.input_batch.refresh_metadata()

    def sample(self, logits: torch.Tensor) -> tuple[list[int], list[float], Any]:
        """Token ids, raw log-probabilities, and the model runner's output."""
        vllm = self._vllm
        if self._grammars:
            grammar = SimpleNamespace(
                structured_output_request_ids=[list(self.requests)[row] for row in self._grammars],
                grammar_bitmask=np.stack([bitmask_of(kept) for kept in self._grammars.values()]),
            )
            scheduled = SimpleNamespace(scheduled_spec_decode_tokens={})
            vllm.runner.apply_grammar_bitmask(scheduled, grammar, self.input_batch, logits)
        sampler_output = vllm.sampler.Sampler()(logits=logits, sampling_metadata=self.input_batch.sampling_metadata)
        sampled = sampler_output.sampled_token_ids.tolist()
        output = vllm.outputs.ModelRunnerOutput(
            req_ids=list(self.requests), req_id_to_index={}, sampled_token_ids=sampled
        )
        vllm.step.fill(self, output)
        raw = sampler_output.logprobs_tensors.logprobs[:, 0].tolist()
        return [ids[0] for ids in sampled], raw, output


def expected(logits: torch.Tensor, asked: dict[str, Any], grammar: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities and kept tokens of one row by the definitions, in float64."""
    x = logits.double().numpy().copy()
    out = np.zeros(V, dtype=bool)
    if grammar is not None:
        out |= ~grammar
    if asked.get("allowed_token_ids"):
        out[[t for t in range(V) if t not in asked["allowed_token_ids"]]] = True
    if asked.get("bad_words"):
        out[9] = True
    if asked.get("min_tokens"):
        out[asked["ends"]] = True
    for token, bias in (asked.get("logit_bias") or {}).items():
        x[token] += bias
    x /= asked.get("temperature", 1.0)
    x[out] = -np.inf

    def probabilities() -> np.ndarray:
        weights = np.exp(x - x.max())
        return weights / weights.sum()

    if asked.get("min_p"):
        p = probabilities()
        x[p < asked["min_p"] * p.max()] = -np.inf
    if asked.get("top_k"):
        x[x < np.sort(x)[-asked["top_k"]]] = -np.inf
    if asked.get("top_p", 1.0) < 1:
        p = probabilities()
        order = np.argsort(-p)
        before = np.cumsum(p[order]) - p[order]
        x[order[before >= asked["top_p"]]] = -np.inf
    with np.errstate(divide="ignore"):
        return np.log(probabilities()), x > -np.inf


PARAMETERS: dict[str, dict[str, Any]] = {
    "cool": {"temperature": 0.3},
    "warm": {"temperature": 1.3},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "min_tokens": {"min_tokens": 3, "ends": [4, 5]},
    "bad_words": {"bad_words": ["x"]},
    "bias": {"logit_bias": {3: 4.0, 10: -100.0}},
    "allowed": {"allowed_token_ids": list(range(2, 90))},
}
GRAMMARS: dict[str, np.ndarray | None] = {"": None, "grammar": GRAMMAR, "few": FEW}


@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 1 << 16),
    rows=st.lists(
        st.tuples(st.sets(st.sampled_from(sorted(PARAMETERS))), st.sampled_from(sorted(GRAMMARS))),
        min_size=1,
        max_size=BATCH,
    ),
)
def test_figures_are_those_of_the_distribution_that_was_sampled(
    vllm: Any, seed: int, rows: list[tuple[set[str], str]]
) -> None:
    """Each parameter alone and joined, in batches of rows that differ."""
    torch.manual_seed(seed)
    given_rows: list[dict[str, Any]] = []
    grammars: dict[int, np.ndarray] = {}
    for number, (names, grammar) in enumerate(rows):
        chosen: dict[str, Any] = {}
        for name in sorted(names):
            chosen |= PARAMETERS[name]
        if (is_kept := GRAMMARS[grammar]) is not None:
            # Something must stay in play.
            is_kept = is_kept if not names & {"allowed", "bad_words", "min_tokens"} else GRAMMAR
            grammars[number] = is_kept
            chosen["structured_outputs"] = vllm.params.StructuredOutputsParams(regex="x")
        given_rows.append(chosen)
    batch = Batch(vllm, [dict(chosen) for chosen in given_rows], grammars)
    logits = torch.randn(len(rows), V) * 3
    whole = logits.clone()
    token_ids, raw, output = batch.sample(logits)
    raw_expected = whole.double().log_softmax(-1)
    masks = output.sampling_masks
    for row, (chosen, token, raw_logprob) in enumerate(zip(given_rows, token_ids, raw, strict=True)):
        assert raw_logprob == pytest.approx(float(raw_expected[row, token]), abs=1e-5)
        entry = masks.slice_request(row, 1).to_nested_list() if masks is not None else [[]]
        source = sampling_payload.logprob_source([*batch.requests.values()][row].sampling_params)
        is_cut = bool(chosen.keys() - {"temperature", "logit_bias"})
        uncut = "whole" if chosen else "raw"
        assert source == ("cut" if is_cut else uncut)
        read = sampling_payload.read_choice(source, [raw_logprob], entry)
        logprobs, is_kept = expected(whole[row], chosen, grammars.get(row))
        assert is_kept[token]
        assert read.logprobs == [pytest.approx(logprobs[token], abs=1e-5)]
        if is_kept.all() or not is_cut:
            assert (read.kept, read.sets) == ([], [])
        else:
            assert read.kept == [0]
            told = np.zeros(V, dtype=bool)
            told[unpack_set(read.sets[0])] = True
            # Where probabilities pile up to top_p exactly, float32 may cut one token earlier or later; beside rows with
            # top_p, vLLM cuts those whose probability it takes for 0.
            differs = (told != is_kept) & (logprobs > -80)
            assert differs.sum() <= ("top_p" in chosen)
            assert len(read.sets[0]) == 1 + min(4 * told.sum(), V // 8)


def test_sampling_without_truncation_at_temperature_1_costs_no_figures(vllm: Any) -> None:
    batch = Batch(vllm, [{}, {"temperature": 0.0}, {"presence_penalty": 1.0}], {})
    logits = torch.randn(3, V)
    measured = kept_sets.measure
    _, raw, output = batch.sample(logits)
    assert output.sampling_masks is None
    assert kept_sets.measure is measured
    sources = [sampling_payload.logprob_source(state.sampling_params) for state in batch.requests.values()]
    assert sources == ["raw", "unknown", "unknown"]
    assert sampling_payload.read_choice("raw", raw[:1], []) == (raw[:1], [], [])
    assert sampling_payload.read_choice("unknown", raw[:1], []).logprobs is None


def test_a_set_is_sent_once_for_a_choice(vllm: Any) -> None:
    structured = vllm.params.StructuredOutputsParams(regex="x")
    batch = Batch(vllm, [{"structured_outputs": structured}] * 2, {0: GRAMMAR, 1: FEW})
    told: list[list[int]] = []
    raw: list[float] = []
    for step in range(3):
        batch._grammars[0] = FEW if step == 1 else GRAMMAR
        _, logprobs, output = batch.sample(torch.randn(2, V))
        told += output.sampling_masks.slice_request(0, 1).to_nested_list()
        raw.append(logprobs[0])
    assert [len(entry) for entry in told] == [3 + V // 32, 3 + 4, 2]
    read = sampling_payload.read_choice("cut", raw, told)
    assert read.kept == [0, 1, 0]
    assert read.sets == [pack_set(np.flatnonzero(GRAMMAR), V), pack_set(np.flatnonzero(FEW), V)]


def test_a_grammar_that_allows_everything_leaves_the_whole_vocabulary(vllm: Any) -> None:
    structured = vllm.params.StructuredOutputsParams(regex="x")
    batch = Batch(vllm, [{"structured_outputs": structured}], {0: np.ones(V, dtype=bool)})
    _, raw, output = batch.sample(torch.randn(1, V))
    read = sampling_payload.read_choice("cut", raw, output.sampling_masks.slice_request(0, 1).to_nested_list())
    assert read == ([pytest.approx(raw[0], abs=1e-6)], [], [])


def test_a_row_whose_token_is_dropped_names_no_set(vllm: Any) -> None:
    """The last piece of a long prompt comes first; what was sampled before it is thrown away."""
    choices = [sampling_payload.Choice(True, {}), sampling_payload.Choice(True, {})]
    output = SimpleNamespace(sampled_token_ids=[[], [3]])
    logits = torch.full((2, V), -torch.inf)
    logits[:, :5] = 1.0
    kept_sets.attach(output, [*choices], lambda *rows: kept_sets.measure(logits, *rows))
    assert choices[0].numbers == {}
    assert output.sampling_masks.slice_request(0, 0).to_nested_list() == []
    (entry,) = output.sampling_masks.slice_request(1, 1).to_nested_list()
    assert sampling_payload.read_choice("cut", [-1.0], [entry]).logprobs == [pytest.approx(-np.log(5))]


def test_a_device_measures_as_a_cpu_does() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 1001) * 4
    logits[1, 20:] = -torch.inf
    logits[2, ::2] = -torch.inf
    logits[3, :] = -torch.inf
    sampled = [7, 3, 1, 0]
    there = kept_sets.DeviceFigures(logits, torch.tensor([[t] for t in sampled]))
    rows = [0, 1, 2]
    for one, other in (
        (kept_sets.measure(logits, rows, sampled[:3], True), there.of_rows(rows, [], True)),
        (kept_sets.measure(logits, rows, sampled[:3], False), there.of_rows(rows, [], False)),
        (kept_sets.measure(logits, rows[:0], [], True), there.of_rows([], [], True)),
    ):
        np.testing.assert_allclose(one.logprobs_R, other.logprobs_R, atol=1e-6)
        entries = [
            sampling_payload.make_entries(
                figures._replace(logprobs_R=np.zeros_like(figures.logprobs_R)),
                [sampling_payload.Choice(True, {}) for _ in one.logprobs_R],
            )
            for figures in (one, other)
        ]
        np.testing.assert_array_equal(entries[0][0], entries[1][0])
        assert entries[0][1] == entries[1][1]


def test_an_output_that_is_still_being_copied_gets_its_entries_when_it_is_there(vllm: Any) -> None:
    """As with asynchronous scheduling on CUDA."""
    batch = Batch(vllm, [{"top_k": 5}, {}], {})
    whole = SimpleNamespace(sampled_token_ids=[[3], [4]], sampling_masks=None)
    output = SimpleNamespace(_sampled_token_ids=torch.tensor([[3], [4]]), get_output=lambda: whole)
    step = kept_sets.SamplerStep()
    step.logits_BV = torch.full((2, V), -torch.inf)
    step.logits_BV[:, :5] = 1.0
    step.fill(batch, output)
    assert whole.sampling_masks is None
    assert output.get_output() is whole
    masks = cast(Any, whole.sampling_masks)  # no longer None
    told = masks.slice_request(0, 1).to_nested_list()
    read = sampling_payload.read_choice("cut", [-2.0], told)
    assert read == ([pytest.approx(-np.log(5))], [0], [pack_set(np.arange(5), V)])
    assert masks.slice_request(1, 1).to_nested_list() == [[]]


class OnGPU(torch.Tensor):
    """As if it were on a GPU."""

    is_cpu = False  # type: ignore[assignment]


def test_a_gpu_that_does_not_run_ahead_gets_its_entries_at_once(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with pipeline parallelism, where the output has no `get_output`. The second prompt is not yet at its end."""
    batch = Batch(vllm, [{"top_k": 5}, {"top_k": 5}], {})
    output = SimpleNamespace(sampled_token_ids=[[3], []], sampling_masks=None)
    step = kept_sets.SamplerStep()
    logits = torch.full((2, V), -torch.inf)
    logits[:, :5] = 1.0
    step.logits_BV = logits.as_subclass(OnGPU)
    monkeypatch.setattr(kept_sets, "measure", None)  # reads the memory of a CPU
    step.fill(batch, output)
    masks = cast(Any, output.sampling_masks)
    told = masks.slice_request(0, 1).to_nested_list()
    read = sampling_payload.read_choice("cut", [-2.0], told)
    assert read == ([pytest.approx(-np.log(5))], [0], [pack_set(np.arange(5), V)])
    assert masks.slice_request(1, 1).to_nested_list() == [[]]


def test_a_fault_of_ours_leaves_the_step_without_entries(vllm: Any, caplog: pytest.LogCaptureFixture) -> None:
    batch = Batch(vllm, [{"top_k": 5}], {})
    step = kept_sets.SamplerStep()
    output = SimpleNamespace(sampled_token_ids=[[V + 1]], sampling_masks=None)
    for _ in range(2):
        step.logits_BV = torch.randn(1, V)
        step.fill(batch, output)
    assert output.sampling_masks is None
    assert caplog.text.count("no sampled log-probabilities") == 1


@pytest.mark.parametrize(
    "told",
    [
        [],
        [[]],
        [[-1]],
        [[3, 0]],
        [[-1, struct.unpack("i", struct.pack("f", float("nan")))[0]]],
        [[-1, struct.unpack("i", struct.pack("f", float("-inf")))[0]]],
    ],
)
def test_entries_that_are_missing_or_not_finite_make_the_choice_unknown(
    told: list[list[int]],
) -> None:
    assert sampling_payload.read_choice("cut", [-1.0], told) == (None, [], [])
    assert sampling_payload.read_choice("raw", [float("nan")], told) == (None, [], [])


def test_a_function_that_vllm_has_moved_is_named() -> None:
    owner = SimpleNamespace(__name__="Runner", sample=lambda: None)
    with pytest.raises(ImportError, match=r"Runner.draw"):
        kept_sets.patch_target(owner, "draw")
    with pytest.raises(ImportError, match=r"Runner.sample apply_mask"):
        kept_sets.patch_target(owner, "sample", uses="apply_mask")


def test_the_scheduler_hands_entries_on(vllm: Any) -> None:
    make = vllm.scheduler.Scheduler.__init__
    kept_sets.install()
    assert vllm.scheduler.Scheduler.__init__ is not make


TINY = BaseModel("art/tiny", TINY_DIR)


def test_what_was_not_recorded_is_unknown() -> None:
    """An engine that records nothing sends no entries: the raw log-probabilities do not stand in for them."""
    for source in ("whole", "cut"):
        assert sampling_payload.read_choice(source, [-1.0, -2.0], [(), ()]) == (None, [], [])
        assert sampling_payload.read_choice(source, [-1.0, -2.0], []) == (None, [], [])
    assert sampling_payload.read_choice("raw", [-1.0, -2.0], []) == ([-1.0, -2.0], [], [])


RUNNER, SAMPLER = "VLLM_USE_V2_MODEL_RUNNER", "VLLM_USE_FLASHINFER_SAMPLER"


@pytest.mark.parametrize("settings", [{"record_distributions": True}, {"exact": True}])
def test_on_cuda_distributions_are_recorded_on_request(settings: dict[str, Any]) -> None:
    """They need the earlier runner and sampler, whatever the environment says."""
    config = ServerConfig(path=Path("x"), **settings)
    environment = engine_environment(config, TINY, "cuda", {RUNNER: "1"})
    assert environment[RUNNER] == environment[SAMPLER] == "0" and environment[switches.DISTRIBUTIONS_SWITCH]


def test_by_default_cuda_has_vllm_s_own_runner_and_sampler() -> None:
    environment = engine_environment(ServerConfig(path=Path("x")), TINY, "cuda", {})
    assert environment[switches.SWITCH] == "cuda"
    assert not {RUNNER, SAMPLER, switches.DISTRIBUTIONS_SWITCH} & environment.keys()


def test_a_cpu_records_always() -> None:
    environment = engine_environment(ServerConfig(path=Path("x")), TINY, "cpu", {})
    assert environment[switches.DISTRIBUTIONS_SWITCH] and RUNNER not in environment


def test_a_model_requests_them_at_its_registration() -> None:
    config = ServerConfig(path=Path("x")).with_requested({"record_distributions": "true"}, 100)
    assert config.records_distributions("cuda") and not config.engine_args
    config = ServerConfig(path=Path("x")).with_requested({"record_distributions": "false"}, 100)
    assert not config.records_distributions("cuda")
