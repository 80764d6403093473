"""The memory plan: models that must fit are planned; models that cannot are refused with the numbers."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from art_protocol.wire import LoRAConfig
from art_server.engine.device.model_size import read_model_size
from art_server.engine.device.plan import GIB, Card, Demand, MemoryPlan, make_memory_plan
from art_server.errors import InvalidInput
from art_server.settings import Handover
from art_server.store.base_models import TINY_DIR, weight_bytes
from art_server.trainer.policy import Policy
from tests.quick.engine.device.cards import CARDS, SIZES, card, context_table, demand, table
from tests.refusals import refused

LARGEST = {"16 GB": "4B", "24 GB": "8B", "48 GB": "14B", "80 GB": "32B", "141 GB": "32B"}

GPU_PAGE = Path(__file__).parents[4] / "docs" / "gpu.md"


def check(card: Card, demand: Demand, plan: MemoryPlan) -> None:
    """By hand: half a GiB for each process, one for vLLM's graphs, and the weights of whoever is on the card."""
    size, share = demand.size, plan.utilization * card.total
    base = size.weights(demand.trainer_itemsize)
    width = 28 * size.hidden + 8 * size.intermediate
    activations = plan.tokens * size.num_layers * width * demand.trainer_itemsize
    checkpointed = plan.checkpointed_tokens * (size.num_layers * size.hidden + width) * demand.trainer_itemsize
    trainer = base + max(activations, checkpointed)
    if plan.training_card is not None:
        assert share + GIB / 2 <= card.total and trainer + GIB / 2 <= plan.training_card.total
    elif plan.handover == "none":
        assert share + trainer + GIB <= card.total
    else:
        assert share + GIB <= card.total and trainer + 2 * GIB <= card.total
    cache = plan.kv_tokens * size.kv_per_token * demand.engine_itemsize
    assert (size.weights(demand.engine_itemsize) + cache) / demand.num_serving <= share
    assert plan.kv_tokens >= demand.kv_tokens and plan.checkpointed_tokens >= demand.row_tokens
    assert plan.host <= card.host


@pytest.mark.parametrize("host_gib", [64, 128, 256])
@pytest.mark.parametrize("name", CARDS)
def test_what_must_fit_fits(name: str, host_gib: int) -> None:
    names = list(SIZES)
    for model in names[: names.index(LARGEST[name]) + 1]:
        if (name, model, host_gib) == ("80 GB", "32B", 64):
            continue  # the weights of a sleeping vLLM alone are as large as main memory
        here, wanted = card(name, host_gib), demand(model)
        check(here, wanted, make_memory_plan(here, wanted))
    for model in names[names.index(LARGEST[name]) + 1 :]:
        with refused(InvalidInput, "does_not_fit", "base_model"):
            make_memory_plan(card(name, host_gib), demand(model))


def test_main_memory_counts() -> None:
    with refused(InvalidInput, "does_not_fit", "base_model"):
        make_memory_plan(card("80 GB", 64), demand("32B"))
    read_again = make_memory_plan(card("80 GB", 128), demand("32B"))
    assert not read_again.is_base_resident and not read_again.has_host_copy
    assert make_memory_plan(card("80 GB", 256), demand("32B")).has_host_copy


def test_quantised_weights_are_read_again() -> None:
    """bitsandbytes keeps references to them that a copy does not reach."""
    packed = replace(SIZES["32B"], num_parameters=10**9, quantized_bytes=31 * 10**9)
    wanted = replace(demand("32B"), size=packed, handover="sleep")
    plan = make_memory_plan(card("48 GB", 512), wanted)
    assert not plan.is_base_resident and not plan.has_host_copy


def test_nothing_leaves_a_card_that_holds_both_and_else_one_sleeps() -> None:
    """By hand: the weights of 14B are 27.5 GiB, of 8B 15.3 GiB, once for the engine and once for the trainer."""
    both = make_memory_plan(card("80 GB"), demand("14B"))
    assert (both.handover, both.is_base_resident) == ("none", True)
    one = make_memory_plan(card("24 GB"), demand("8B"))
    assert (one.handover, one.is_base_resident) == ("sleep", False)


def test_a_card_that_holds_both_without_room_to_work_has_one_sleep() -> None:
    """Unless the sleeping engine's weights do not fit main memory."""
    narrow = replace(demand("8B"), handover="none")
    plan = make_memory_plan(card("48 GB"), narrow)
    assert plan.handover == "none" and not plan.is_roomy
    assert make_memory_plan(card("48 GB"), demand("8B")).handover == "sleep"
    assert make_memory_plan(card("48 GB", host_gib=16), demand("8B")).handover == "none"


def test_shards_stay_while_the_engine_sleeps() -> None:
    divided = replace(demand("14B"), num_ranks=4, shard="on", handover="sleep")
    plan = make_memory_plan(card("80 GB"), divided)
    assert (plan.handover, plan.is_base_resident, plan.num_shards) == ("sleep", True, 4)
    alone = make_memory_plan(card("80 GB"), replace(divided, num_ranks=1, shard="off"))
    assert plan.utilization < alone.utilization and plan.checkpointed_tokens > alone.checkpointed_tokens


def test_the_tables_of_the_docs_are_the_plans() -> None:
    """`python -m tests.quick.engine.device.cards` prints the tables."""
    page = GPU_PAGE.read_text()
    assert table() in page and context_table() in page


def test_a_trainer_with_a_card_of_its_own_takes_no_turns() -> None:
    own, wanted = card("24 GB"), replace(demand("8B"), training_card=card("24 GB"))
    plan = make_memory_plan(card("24 GB"), wanted)
    check(own, wanted, plan)
    assert (plan.handover, plan.is_base_resident) == ("none", True)
    assert plan.utilization > 0.9 and plan.tokens > make_memory_plan(own, demand("8B")).tokens / 2
    assert "the trainer has 24 GB, 23.6 GiB, to itself" in plan.summary(own)
    small = replace(demand("14B"), training_card=card("24 GB"), num_serving=2)
    with refused(InvalidInput, "does_not_fit", "base_model"):
        make_memory_plan(card("48 GB"), small)
    make_memory_plan(card("48 GB"), replace(small, training_card=card("80 GB")))


def test_an_engine_whose_trainer_is_elsewhere_has_the_card_to_itself() -> None:
    """A model is served where it could not be trained."""
    here, wanted = card("24 GB"), demand("1.7B")
    plan = make_memory_plan(here, replace(wanted, num_ranks=0))
    shared = make_memory_plan(here, wanted)
    assert (plan.handover, plan.is_base_resident, plan.trains, plan.tokens) == ("none", True, False, 0)
    assert plan.utilization > 0.9 > shared.utilization and plan.kv_tokens > shared.kv_tokens
    assert "the trainer works on other machines" in plan.summary(here) and "micro-batch" not in plan.summary(here)
    assert make_memory_plan(here, demand("8B")).handover == "sleep"
    assert make_memory_plan(here, replace(demand("8B"), num_ranks=0)).handover == "none"
    with refused(InvalidInput, "does_not_fit", "base_model"):
        make_memory_plan(here, replace(demand("32B"), num_ranks=0))


def test_several_cards_share_the_engine() -> None:
    wanted = replace(demand("32B"), training_card=card("80 GB"))
    divided = replace(wanted, num_serving=2)
    with refused(InvalidInput, "does_not_fit", "base_model"):
        make_memory_plan(card("48 GB"), wanted)
    one = make_memory_plan(card("80 GB"), wanted).kv_tokens
    two = make_memory_plan(card("80 GB"), divided).kv_tokens
    assert two > 4 * one
    check(card("48 GB"), divided, make_memory_plan(card("48 GB"), divided))


def test_recurrent_states_have_room() -> None:
    """By hand: 16 sequences of 10^7 numbers, four bytes each."""
    hybrid = replace(SIZES["4B"], state_per_sequence=10**7)
    wanted = replace(demand("4B"), utilization=0.6)
    usual = make_memory_plan(card("80 GB"), wanted)
    plan = make_memory_plan(card("80 GB"), replace(wanted, size=hybrid))
    check(card("80 GB"), wanted, plan)
    per_token = SIZES["4B"].kv_per_token * 2
    assert (usual.kv_tokens - plan.kv_tokens) * per_token == pytest.approx(64e7, abs=2 * per_token)


def test_a_model_of_recurrent_layers_alone_is_planned() -> None:
    recurrent = replace(SIZES["4B"], kv_per_token=0, state_per_sequence=10**7)
    wanted = replace(demand("4B"), size=recurrent)
    check(card("24 GB"), wanted, make_memory_plan(card("24 GB"), wanted))
    with refused(InvalidInput, "does_not_fit", "base_model"):
        make_memory_plan(card("16 GB"), replace(wanted, utilization=0.1))


def test_each_card_of_a_sleeping_engine_copies_its_share() -> None:
    wanted = replace(demand("32B"), handover="sleep")
    one = make_memory_plan(card("141 GB"), wanted)
    two = make_memory_plan(card("141 GB"), replace(wanted, num_serving=2))
    assert one.host == pytest.approx(two.host)
    with refused(InvalidInput, "does_not_fit", "base_model"):
        make_memory_plan(card("141 GB", host_gib=64), replace(wanted, num_serving=2))


def test_more_cards_than_heads_have_copies_of_the_cache() -> None:
    wanted = replace(demand("8B"), utilization=0.9, training_card=card("80 GB"))

    def kv_tokens(heads: int, cards: int) -> int:
        model = replace(wanted.size, kv_heads=heads)
        return make_memory_plan(card("80 GB"), replace(wanted, size=model, num_serving=cards)).kv_tokens

    assert kv_tokens(8, 4) > 3.9 * kv_tokens(1, 4)
    assert kv_tokens(2, 4) == pytest.approx(2 * kv_tokens(1, 4), rel=0.001)


@pytest.mark.parametrize("handover", ["none", "sleep"])
def test_numbers_on_the_command_line_count(handover: Handover) -> None:
    wanted = replace(demand("4B"), utilization=0.4, handover=handover)
    plan = make_memory_plan(card("80 GB"), wanted)
    assert (plan.handover, plan.utilization) == (handover, 0.4)


def test_the_log_says_what_leaves_the_card() -> None:
    here = card("24 GB")
    plan = make_memory_plan(here, demand("8B"))
    assert plan.summary(here) == (
        "memory plan for 24 GB, 23.6 GiB (handover: sleep; the trainer's base leaves the card between steps): the engine's "
        "share is 21.7 GiB, 26,445 tokens of KV cache; main memory: 42.6 of 256.0 GiB; tokens per micro-batch: 241, 5,130 "
        "with gradient checkpointing"
    )


@given(
    gib=st.floats(8, 200),
    host=st.floats(16, 512),
    model=st.sampled_from(sorted(SIZES)),
    rank=st.sampled_from([8, 64, 256]),
    length=st.sampled_from([None, 512, 16_384]),
    itemsize=st.sampled_from([2.0, 4.0]),
)
def test_no_plan_is_above_the_card(
    gib: float, host: float, model: str, rank: int, length: int | None, itemsize: float
) -> None:
    here = Card("a card", int(gib * GIB), int(host * GIB))
    wanted = Demand(model, SIZES[model], itemsize, itemsize, rank, 4, max_seq_length=length)
    try:
        plan = make_memory_plan(here, wanted)
    except InvalidInput:
        return
    check(here, wanted, plan)


def test_size_of_a_real_folder() -> None:
    read = read_model_size(TINY_DIR)
    policy = Policy(str(TINY_DIR), torch.float32)
    assert read.num_parameters == policy.num_parameters
    policy.init_adapter(LoRAConfig(rank=4), 0)
    assert 4 * read.lora_width == sum(parameter.numel() for parameter in policy.parameters.values())
    config = json.loads((TINY_DIR / "config.json").read_text())
    of_layer = 2 * config["num_key_value_heads"] * config["head_dim"]
    assert read.kv_per_token == config["num_hidden_layers"] * of_layer


def test_quantised_weights_keep_their_size(tmp_path: Path) -> None:
    shutil.copy(TINY_DIR / "config.json", tmp_path / "config.json")
    tensors = {
        "model.layers.0.q_proj.weight": torch.zeros(32, 1, dtype=torch.uint8),
        "model.norm": torch.zeros(8),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    read = read_model_size(tmp_path)
    assert (read.num_parameters, read.quantized_bytes) == (8, 32)
    assert read.weights(2) == 8 * 2 + 32
    assert read.lora_width == read_model_size(TINY_DIR).lora_width


def test_weights_in_two_formats_count_once(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TINY_DIR / name, tmp_path / name)
    shutil.copy(TINY_DIR / "model.safetensors", tmp_path / "consolidated.safetensors")
    assert read_model_size(tmp_path) == read_model_size(TINY_DIR)
    assert weight_bytes(tmp_path) == weight_bytes(TINY_DIR)
