"""Reports from vLLM's processes what each token was sampled from: its log-probability under the behaviour policy, and
the kept set, which top_k, top_p, min_p, a grammar, bad words, min_tokens and allowed_token_ids leave in play.

vLLM can send such sets from the model runner to the request's output (`return_sampling_mask`), but only if every
request has a top_k, and without probabilities. `install` fills the same fields for other requests, too. It also has the
grammar's mask applied after the raw log-probabilities are computed, so that these log-probabilities are the model's own.

This works with `GPUModelRunner` of `vllm/v1/worker/gpu_model_runner.py`, which vLLM uses on CPUs and, if
VLLM_USE_V2_MODEL_RUNNER is 0, on CUDA. By default vLLM 0.32.0 uses the faster runner of `vllm/v1/worker/gpu` on CUDA, so there
this module is installed on request only (`--record-distributions`). With speculative decoding nothing is reported.
"""

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from art_server.engine.vllm_process.sampling_payload import (
    Choice,
    KeptSets,
    SampledRows,
    logprob_source,
    make_entries,
)

logger = logging.getLogger(__name__)


def measure(logits_BV: torch.Tensor, rows: list[int], sampled_R: list[int], with_sets: bool) -> SampledRows:
    """The figures of some rows of processed logits (float32, -inf for tokens outside the kept set) on a CPU."""
    logits, num_vocabulary = logits_BV.numpy(), logits_BV.shape[1]
    if not with_sets:
        return SampledRows(_logprobs(logits_BV, rows, sampled_R), None)
    packed = np.packbits(logits > -np.inf, axis=1, bitorder="little")
    if len(rows) < len(logits):
        packed = packed[rows]
    if packed.shape[1] % 8:
        packed = np.pad(packed, ((0, 0), (0, -packed.shape[1] % 8)))
    kept = KeptSets(packed.view(np.uint64), num_vocabulary)
    listed = np.flatnonzero(kept.is_listed_R)
    if not len(listed):
        return SampledRows(_logprobs(logits_BV, rows, sampled_R), kept)
    # Where few logits are kept, only these are read; torch's kernel reads all logits of a row.
    rows_R, columns_R = np.array(rows), np.array(sampled_R)
    logprobs_R = logits[rows_R, columns_R]
    counts = kept.counts_R[listed]
    ratios = np.exp(logits[np.repeat(rows_R[listed], counts), kept.ids] - np.repeat(logprobs_R[listed], counts))
    logprobs_R[listed] = -np.log(np.add.reduceat(ratios, kept.ends[listed] - counts))
    if len(listed) < len(rows):
        others = np.flatnonzero(~kept.is_listed_R)
        logprobs_R[others] = _logprobs(logits_BV, rows_R[others], columns_R[others])
    return SampledRows(logprobs_R, kept)


def _logprobs(logits_BV: torch.Tensor, rows: Any, sampled: Any) -> np.ndarray:
    part = logits_BV if len(rows) == len(logits_BV) else logits_BV[rows]
    columns = torch.as_tensor(sampled).unsqueeze(1)
    return part.log_softmax(dim=-1).gather(1, columns).squeeze(1).numpy()


class DeviceFigures:
    """The figures of all rows of logits on another device, copied to the CPU while the device continues."""

    def __init__(self, logits_BV: torch.Tensor, sampled_B: torch.Tensor):
        self._num_vocabulary = logits_BV.shape[1]
        columns = sampled_B.long().view(-1, 1)
        logprobs = logits_BV.log_softmax(dim=-1).gather(1, columns).squeeze(1)
        # Whole words of 64 bits, as `KeptSets` reads them.
        is_kept = torch.nn.functional.pad(logits_BV > -torch.inf, (0, -self._num_vocabulary % 64)).view(
            len(logits_BV), -1, 8
        )
        powers = 2 ** torch.arange(8, dtype=torch.uint8, device=logits_BV.device)
        packed = (is_kept * powers).sum(dim=-1, dtype=torch.uint8)
        self._logprobs = logprobs.to("cpu", non_blocking=True)
        self._packed = packed.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if logits_BV.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def of_rows(self, rows: list[int], _: list[int], with_sets: bool) -> SampledRows:
        if self._copied is not None:
            self._copied.synchronize()
        bits = self._packed.numpy()[rows].view(np.uint64)
        kept = KeptSets(bits, self._num_vocabulary) if with_sets else None
        return SampledRows(self._logprobs.numpy()[rows], kept)


class SamplerStep:
    """What our functions in the model runner collect during a step, for the step's output. All steps use the same object."""

    def __init__(self) -> None:
        self.grammar: tuple[Any, ...] | None = None
        """The arguments of vLLM's `apply_grammar_bitmask` except the logits, until the logits exist in float32."""
        self.logits_BV: torch.Tensor | None = None
        """The processed logits that were sampled from; None if all rows are greedy."""
        self._choices: dict[str, Choice | None] = {}
        """By vLLM's request id; None if the request needs no entries."""
        self._has_failed = False

    def fill(self, runner: Any, output: Any) -> None:
        """Puts the entries into the step's output. After an error the output has no entries, and the engine continues."""
        logits_BV, self.logits_BV = self.logits_BV, None
        if logits_BV is None:
            return
        with self._tolerance():
            choices_B = self._choices_of(runner.input_batch.req_ids, runner.requests)
            if all(choice is None for choice in choices_B):
                return
            if not hasattr(output, "get_output"):
                # Without asynchronous scheduling vLLM's output (0.32) has the sampled tokens already.
                attach(output, choices_B, measured_at_once(logits_BV, output.sampled_token_ids))
                return
            figures = DeviceFigures(logits_BV, output._sampled_token_ids)
            get_output = output.get_output

            def get_filled() -> Any:
                whole = get_output()
                with self._tolerance():
                    attach(whole, choices_B, figures.of_rows)
                return whole

            output.get_output = get_filled

    def _choices_of(self, request_ids: list[str], requests: dict[str, Any]) -> list[Choice | None]:
        known = self._choices
        if len(known) > 2 * len(requests) + 64:
            known = self._choices = {key: known[key] for key in requests if key in known}
        for request_id in request_ids:
            if request_id not in known:
                params = requests[request_id].sampling_params
                source = logprob_source(params) if params is not None else "unknown"
                has_entries = source in ("whole", "cut")
                known[request_id] = Choice(source == "cut", {}) if has_entries else None
        return [known[request_id] for request_id in request_ids]

    @contextlib.contextmanager
    def _tolerance(self) -> Iterator[None]:
        try:
            yield
        except Exception:  # must not stop the engine, whose own work is done
            if not self._has_failed:
                logger.exception("tokens have no sampled log-probabilities; logged once")
            self._has_failed = True


Measure = Callable[[list[int], list[int], bool], SampledRows]
"""From rows of the batch and their sampled tokens to figures, with or without the kept sets."""


def measured_at_once(logits_BV: torch.Tensor, sampled: list[list[int]]) -> Measure:
    """Measures logits whose sampled tokens are known: on a CPU, or on a GPU without asynchronous scheduling (pipeline
    parallelism)."""
    if logits_BV.is_cpu:
        return functools.partial(measure, logits_BV)
    tokens_B = torch.tensor([ids[0] if ids else 0 for ids in sampled], device=logits_BV.device)
    return DeviceFigures(logits_BV, tokens_B).of_rows


def attach(output: Any, choices_B: list[Choice | None], measure_rows: Measure) -> None:
    """Puts the entries of a batch into vLLM's field for sampling masks. A row without an output token (its prompt is
    not yet computed to the end) gets an empty entry, because a new set in such an entry would be lost."""
    from vllm.v1.outputs import SamplingMaskLists

    wanted = [
        (row, ids[0], choice)
        for row, (ids, choice) in enumerate(zip(output.sampled_token_ids, choices_B, strict=True))
        if ids and choice is not None
    ]
    lengths_B = np.zeros(len(choices_B) + 1, dtype=np.int64)
    words = np.empty(0, dtype=np.int32)
    if wanted:
        rows, sampled, choices = (list(column) for column in zip(*wanted, strict=True))
        figures = measure_rows(rows, sampled, any(choice.is_cut for choice in choices))
        words, lengths_R = make_entries(figures, choices)
        lengths_B[np.array(rows) + 1] = lengths_R
    # vLLM's form: the words of all rows, and where each row begins.
    output.sampling_masks = SamplingMaskLists(words, np.cumsum(lengths_B))


# --- changes of vLLM ---


def patch_target(owner: Any, name: str, uses: str | None = None) -> Any:
    """A function of vLLM that the caller replaces.

    Raises:
        ImportError: vLLM has no such function, or the function does not call `uses`, which is replaced, too.
    """
    target = getattr(owner, name, None)
    if target is None or (uses and uses not in inspect.unwrap(target).__code__.co_names):
        raise ImportError(f"vLLM has changed: {owner.__name__}.{name} {uses or ''}".rstrip())
    return target


def install() -> None:
    """Has the scheduler pass entries on, and each worker process change its model runner when it makes its worker.

    Raises:
        ImportError: vLLM has changed.
    """
    # Imported here, because tests import this module without vLLM.
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.worker_base import WorkerBase

    patch_target(Scheduler, "update_from_output", uses="return_sampling_mask")
    make_scheduler = patch_target(Scheduler, "__init__")
    make_worker = patch_target(WorkerBase, "__init__")

    def make_scheduler_with_masks(self: Any, *args: Any, **kwargs: Any) -> None:
        make_scheduler(self, *args, **kwargs)
        self.return_sampling_mask = True

    def make_worker_with_figures(self: Any, *args: Any, **kwargs: Any) -> None:
        install_in_runner()  # late, so that the API's and the scheduler's process do not import the runner
        make_worker(self, *args, **kwargs)

    Scheduler.__init__ = make_scheduler_with_masks
    WorkerBase.__init__ = make_worker_with_figures


@functools.cache
def install_in_runner() -> SamplerStep:
    """Changes the model runner and the sampler of this process, once.

    Raises:
        ImportError: vLLM has changed.
    """
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker import gpu_model_runner

    step = SamplerStep()
    runner_class: Any = gpu_model_runner.GPUModelRunner
    apply_bitmask = patch_target(gpu_model_runner, "apply_grammar_bitmask")
    sample_tokens = patch_target(runner_class, "sample_tokens", uses="apply_grammar_bitmask")
    patch_target(Sampler, "forward", uses="apply_logits_processors")
    process_logits = patch_target(Sampler, "apply_logits_processors")
    for name in ("forward_cpu", "forward_native"):
        patch_target(topk_topp_sampler.TopKTopPSampler, name, uses="apply_top_k_top_p")
    cut = patch_target(topk_topp_sampler, "apply_top_k_top_p")

    def keep_grammar(scheduler_output: Any, grammar: Any, input_batch: Any, logits: Any) -> None:
        """Delays the mask until the raw log-probabilities are computed; speculative decoding gets the mask at once."""
        if scheduler_output.scheduled_spec_decode_tokens:
            apply_bitmask(scheduler_output, grammar, input_batch, logits)
        else:
            step.grammar = (scheduler_output, grammar, input_batch)

    def process_with_grammar(self: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        grammar, step.grammar = step.grammar, None
        if grammar is not None:
            apply_bitmask(*grammar, logits)
        return process_logits(self, logits, *args, **kwargs)

    def cut_and_keep(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        logits = step.logits_BV = cut(logits, *args, **kwargs)
        return logits

    def sample_and_report(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A step that failed may have left them.
        step.grammar = step.logits_BV = None
        # `sample_tokens` clears it.
        state = self.execute_model_state
        output = sample_tokens(self, *args, **kwargs)
        # With speculative decoding the logits have a row for each drafted token, not for each request.
        if state is None or state.spec_decode_metadata is None:
            step.fill(self, output)
        return output

    gpu_model_runner.apply_grammar_bitmask = keep_grammar
    Sampler.apply_logits_processors = process_with_grammar
    topk_topp_sampler.apply_top_k_top_p = cut_and_keep
    runner_class.sample_tokens = sample_and_report
    return step
