"""Recurrent layers over a forest: the plan of their calls, and the same gradient as row by row."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from art_protocol.wire import TrainConfig
from art_server.trainer.policy import Policy
from art_server.trainer.states import MAX_PADDING, plan_layer_calls
from art_server.trainer.tree import lay_out, sort_sequences
from tests.makers.forests import assert_tree_equals_rows, save_random_adapter
from tests.makers.toy_models import make_model

RECURRENT = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "granitemoehybrid", "lfm2", "lfm2_moe", "nemotron_h", "falcon_h1", "olmo_hybrid")  # fmt: skip


@pytest.fixture(scope="module", params=RECURRENT)
def started(request: pytest.FixtureRequest, tmp_path_factory) -> tuple[Policy, Path]:
    folder = tmp_path_factory.mktemp("states")
    policy = Policy(str(make_model(request.param, folder / "base")), torch.float32)
    return policy, save_random_adapter(policy, folder / "adapter")


def test_a_node_starts_from_its_parents_state(started: tuple[Policy, Path], tmp_path: Path) -> None:
    config = TrainConfig(max_grad_norm=1e9)
    assert_tree_equals_rows(started, tmp_path, config, 0, 600, 0.05, True, tolerance=1e-4)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12))
def test_a_plan_computes_each_token_once_after_those_before_it(sequences: list[list[int]]) -> None:
    forest = lay_out(sequences, sort_sequences(sequences, min_shared=1))
    ends: dict[int, tuple[int, ...]] = {}  # a layer's state: all tokens that it has seen
    computed: dict[int, tuple[int, ...]] = {}
    plan = plan_layer_calls(forest.nodes)
    assert plan.num_nodes == len(forest.nodes)
    for runs in plan.calls:
        lengths = [len(run.tokens) for run in runs]
        assert max(lengths) <= max(MAX_PADDING * min(lengths), 2)
        assert len({run.parent is None for run in runs}) == 1
        for run in runs:
            before = () if run.parent is None else ends[run.parent]
            seen = before + run.tokens
            own = run.tokens[run.num_repeated :]
            for position, token in enumerate(own, start=len(seen) - len(own)):
                assert token not in computed
                computed[token] = seen[: position + 1]
            if len(runs) == 1 and len(run.tokens) > 1:
                ends[run.node] = seen
    paths = {int(path[-1]): tuple(path.tolist()) for path in forest.paths}
    assert sorted(computed) == list(range(forest.num_tokens))
    assert all(computed[last] == path for last, path in paths.items())
    for node in forest.nodes:
        assert computed[node.start] == computed[node.stop - 1][: int(forest.positions_T[node.start]) + 1]


def test_a_model_of_attention_alone_keeps_its_layers(tmp_path: Path) -> None:
    base = Policy(str(make_model("qwen3", tmp_path / "base")))._base
    assert not [module for module in base.modules() if "forward" in vars(module)]
