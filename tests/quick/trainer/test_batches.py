import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art_protocol.wire import TrainConfig
from art_server.shared.advantages import trained_tokens
from art_server.shared.trainer_messages import (
    Batch,
    SampledSpan,
    TaughtSpan,
    TokenSequence,
    TrainableGroup,
    TrainableTrajectory,
)
from art_server.trainer.batches import (
    drop_stale,
    make_micro_batches,
    make_sampled_tokens,
    make_train_batch,
    with_penalties,
)
from art_server.trainer.teacher import NOT_TAUGHT
from tests.makers.teacher_tops import teacher_top


def group(*rewards_and_sequences: tuple[float, list[TokenSequence]]) -> TrainableGroup:
    return TrainableGroup(
        trajectories=[
            TrainableTrajectory(reward=reward, sequences=sequences) for reward, sequences in rewards_and_sequences
        ]
    )


SEQUENCE = TokenSequence(token_ids=[5, 6, 7, 8, 9], logprobs=[None, None, -0.5, -0.25, None])


def has_signal(one: TrainableGroup, config: TrainConfig | None = None) -> bool:
    return trained_tokens([one], config) != [None]


def test_row_is_cut_before_its_last_trained_token() -> None:
    trained = make_train_batch(Batch(groups=[group((1.0, [SEQUENCE]), (0.0, []))]))
    (sequence,) = trained.sequences
    assert sequence.token_ids == [5, 6, 7]
    assert sequence.positions == [1, 2]
    assert sequence.targets == [7, 8]
    assert sequence.sampled_logprobs == [-0.5, -0.25]
    assert sequence.advantages == pytest.approx([1.0, 1.0], abs=1e-5)


def test_groups_without_signal_are_outside_rows_and_denominators_and_are_counted() -> None:
    live, dead, single = (
        group((1.0, [SEQUENCE]), (0.0, [SEQUENCE])),
        group((2.0, [SEQUENCE]), (2.0, [SEQUENCE])),
        group((9.0, [SEQUENCE])),
    )
    trained = make_train_batch(Batch(groups=[dead, live, single]))
    assert trained.num_groups == 3
    assert trained.num_groups_trainable == 1
    assert trained.num_trajectories == 5
    assert len(trained.sequences) == 2
    assert trained.num_tokens == 4


def test_group_whose_tokens_are_all_context_is_not_trainable() -> None:
    context = TokenSequence(token_ids=[1, 2], logprobs=[None, None])
    trained = make_train_batch(Batch(groups=[group((1.0, [context]), (0.0, [])), group()]))
    assert trained.sequences == []
    assert trained.num_groups_trainable == 0
    assert trained.num_groups == 2


def test_token_at_position_zero_cannot_be_trained_and_is_counted() -> None:
    sequence = TokenSequence(token_ids=[3, 4], logprobs=[-1.0, -2.0])
    trained = make_train_batch(Batch(groups=[group((1.0, [sequence]), (0.0, [sequence]))]))
    assert [sequence.targets for sequence in trained.sequences] == [[4], [4]]
    assert trained.num_tokens == 2
    assert trained.num_tokens_unpredicted == 2


def test_row_with_more_tokens_than_logprobs_is_refused() -> None:
    sequence = TokenSequence(token_ids=[3, 4], logprobs=[None])
    with pytest.raises(ValueError, match="log-probabilities"):
        make_train_batch(Batch(groups=[group((1.0, [sequence]), (0.0, [sequence]))]))


def test_tokens_to_recompute_are_trained_without_a_sampled_log_probability() -> None:
    sequence = TokenSequence(token_ids=[5, 6, 7, 8], logprobs=[None, None, -0.5, None], recompute=[3])
    trained = make_train_batch(Batch(groups=[group((1.0, [sequence]), (0.0, [sequence]))]))
    assert trained.sequences[0].targets == [7, 8]
    assert trained.sequences[0].sampled_logprobs == [-0.5, None]
    assert make_sampled_tokens(trained.sequences).is_unknown_S.tolist() == [
        False,
        True,
        False,
        True,
    ]


def test_position_that_is_both_known_and_to_recompute_is_refused() -> None:
    sequence = TokenSequence(token_ids=[5, 6], logprobs=[None, -0.5], recompute=[1])
    with pytest.raises(ValueError, match=r"positions \[1\]"):
        make_train_batch(Batch(groups=[group((1.0, [sequence]), (0.0, [sequence]))]))


def test_given_advantages_hold_at_their_positions_and_make_a_group_live() -> None:
    sequence = TokenSequence(token_ids=[5, 6, 7], logprobs=[None, -0.5, -0.5], advantages={2: 3.0})
    trained = make_train_batch(Batch(groups=[group((1.0, [sequence]), (1.0, [SEQUENCE]))]))
    assert [sequence.advantages for sequence in trained.sequences] == [[0.0, 3.0], [0.0, 0.0]]
    assert trained.num_groups_trainable == 1


def taught(*logprobs: float) -> TokenSequence:
    """SEQUENCE with a teacher's log-probability of token 3 at positions 2 and 3."""
    top = teacher_top([[3]] * len(logprobs), [[logprob] for logprob in logprobs])
    return SEQUENCE.model_copy(update={"taught": [TaughtSpan(start=2, stop=2 + len(logprobs), top=top)]})


def test_a_teacher_s_targets_make_a_group_live_and_equal_targets_are_one_prediction() -> None:
    batch = Batch(groups=[group((1.0, [taught(-1, -2)]), (1.0, [taught(-1, -3)]), (1.0, [SEQUENCE]))])
    trained = make_train_batch(batch)
    assert trained.num_groups_trainable == 1
    assert [sequence.taught for sequence in trained.sequences] == [[0, 1], [0, 2], []]
    assert trained.taught.ids_UK.tolist() == [[3]] * 3
    assert trained.taught.logprobs_UK.tolist() == [[-1], [-2], [-3]]
    (micro_batch,) = make_micro_batches(trained.sequences, 100, taught=trained.taught)
    assert micro_batch.num_tokens == 3, "the sequences share their tokens"
    of_tokens = micro_batch.taught_N[micro_batch.predictions_S].tolist()
    assert of_tokens == [0, 1, 0, 2, NOT_TAUGHT, NOT_TAUGHT]
    assert len(micro_batch.taught_N) == 5


def test_targets_of_context_teach_nothing() -> None:
    """Tokens that are too stale, and sequences that a mask leaves out."""
    spans = [SampledSpan(start=2, stop=4, step=1)]
    stale = taught(-1, -2).model_copy(update={"spans": spans})
    kept, _ = drop_stale(Batch(groups=[group((1.0, [stale]))]), 2)
    assert make_train_batch(kept).sequences == []
    cut = taught(-1, -2).model_copy(update={"truncated": True})
    assert make_train_batch(Batch(groups=[group((1.0, [cut]))]), TrainConfig(overlong="mask")).sequences == []


def test_turn_rewards_reach_the_tokens_up_to_their_turn() -> None:
    # Turns end at 2 and 4 of the first sequence and at 2 of the second: their rewards 4, 0 and 2 have mean 2.
    first = TokenSequence(token_ids=[5, 6, 7, 8, 9], logprobs=[None, -1, -1, -1, -1], rewards=[(2, 4.0), (4, 0.0)])
    second = TokenSequence(token_ids=[5, 6, 7], logprobs=[None, -1, -1], rewards=[(2, 2.0)])
    config = TrainConfig(scaling="none")
    other = (1.0, [TokenSequence(token_ids=[5, 6], logprobs=[None, -1])])
    batch = Batch(groups=[group((1.0, [first, second]), other)])
    sequences = make_train_batch(batch, config).sequences
    # Normalised 2, -2, 0: all three are ahead of the first turn, two of the second, one of the last.
    assert [sequence.advantages for sequence in sequences] == [[0, 0, -2, -2], [0, 0], [0]]


def test_truncated_trajectories_can_be_left_out_of_loss_and_denominators() -> None:
    cut_sequence = SEQUENCE.model_copy(update={"truncated": True})
    cut = TrainableTrajectory(reward=0.0, sequences=[cut_sequence])
    whole = TrainableTrajectory(reward=1.0, sequences=[SEQUENCE])
    batch = Batch(groups=[TrainableGroup(trajectories=[cut, whole])])
    masked = make_train_batch(batch, TrainConfig(overlong="mask"))
    assert [sequence.trajectory for sequence in masked.sequences] == [1]
    assert (masked.num_tokens, masked.num_trajectories_masked) == (2, 1)
    assert len(make_train_batch(batch, TrainConfig()).sequences) == 2


def test_tokens_that_are_too_stale_are_context_and_counted() -> None:
    spans = [SampledSpan(start=2, stop=3, step=1), SampledSpan(start=3, stop=4, step=4)]
    old, unknown = SEQUENCE.model_copy(update={"spans": spans}), SEQUENCE
    batch = Batch(groups=[group((1.0, [old]), (0.0, [unknown]))])
    kept, num_dropped = drop_stale(batch, 2)
    first, second = make_train_batch(kept).sequences
    assert (num_dropped, first.targets, first.token_ids) == (1, [8], [5, 6, 7])
    assert second.targets == [7, 8], "whose step is unknown is trained"
    assert drop_stale(batch, 1) == (batch, 0)
    without = SEQUENCE.model_copy(update={"logprobs": [None] * 5, "recompute": [2, 3], "spans": spans})
    kept, num_dropped = drop_stale(Batch(groups=[group((1.0, [without]))]), 2)
    assert (num_dropped, kept.groups[0].trajectories[0].sequences[0].recompute) == (1, [3])


def test_weights_of_each_normalisation_by_hand() -> None:
    # One trajectory with a token, one with two sequences of two.
    short = TokenSequence(token_ids=[5, 6], logprobs=[None, -1.0])
    sequences = make_train_batch(Batch(groups=[group((1.0, [short]), (0.0, [SEQUENCE, SEQUENCE]))])).sequences
    weights = {
        normalisation: make_sampled_tokens(sequences, TrainConfig(normalisation=normalisation, constant_length=10))
        for normalisation in ("tokens", "trajectory", "constant")
    }
    assert weights["tokens"].weights_S.tolist() == pytest.approx([1 / 5] * 5)
    assert weights["trajectory"].weights_S.tolist() == pytest.approx([1 / 2, *[1 / 8] * 4])
    assert weights["constant"].weights_S.tolist() == pytest.approx([1 / 20] * 5)
    assert weights["tokens"].trajectories_S.tolist() == [0, 1, 1, 1, 1]


def test_equal_tokens_of_several_trajectories_are_predicted_once() -> None:
    sequences = make_train_batch(Batch(groups=[group((1.0, [SEQUENCE]), (0.0, [SEQUENCE]))])).sequences
    (batch,) = make_micro_batches(sequences, 100)
    assert batch.num_tokens == 3
    assert batch.num_sequence_tokens == 6
    assert len(batch.targets_N) == 2
    assert batch.predictions_S.tolist() == [0, 1, 0, 1]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    max_tokens=st.integers(1, 200),
    shared=st.booleans(),
    min_shared=st.integers(1, 9),
)
def test_micro_batches_hold_each_trained_token_once_within_the_budget(
    make_batch, seed: int, max_tokens: int, shared: bool, min_shared: int
) -> None:
    trained = make_train_batch(make_batch(seed, num_openings=2))
    tokens = make_sampled_tokens(trained.sequences)
    expected = [
        (sequence.token_ids[: position + 1], target)
        for sequence in trained.sequences
        for position, target in zip(sequence.positions, sequence.targets, strict=True)
    ]
    seen: list[int] = []
    for batch in make_micro_batches(trained.sequences, max_tokens, shared=shared, min_shared=min_shared):
        forest = batch.forest
        longest = max(len(trained.sequences[index].token_ids) for index in batch.sequences)
        size = forest.num_tokens if shared else longest * len(batch.sequences)
        most = longest + max_tokens // 2 if shared and longest > max_tokens else max(longest, max_tokens)
        assert size <= most
        assert batch.num_sequence_tokens == sum(len(trained.sequences[index].token_ids) for index in batch.sequences)
        for token, prediction in zip(batch.indices_S.tolist(), batch.predictions_S.tolist(), strict=True):
            index = int(batch.forest_indices_N[prediction])
            visible = [key for key in range(index + 1) if index < int(forest.ends_T[key])]
            assert forest.positions_T[visible].tolist() == list(range(len(visible)))
            assert forest.token_ids_T[visible].tolist() == expected[token][0]
            assert int(batch.targets_N[prediction]) == expected[token][1]
            seen.append(token)
    assert sorted(seen) == list(range(len(expected)))
    assert len(tokens.weights_S) == len(expected) == trained.num_tokens


def test_group_without_any_tokens_advantage_is_dead() -> None:
    """Equal rewards and equal turn rewards: its tokens are in no denominator."""
    sequence = TokenSequence(token_ids=[5, 6, 7], logprobs=[None, -1, -1], rewards=[(2, 0.1)])
    equal = group(*[(1.0, [sequence])] * 3)
    live = group((1.0, [SEQUENCE]), (0.0, [SEQUENCE]))
    trained = make_train_batch(Batch(groups=[equal, live]))
    assert (trained.num_groups_trainable, len(trained.sequences)) == (1, 2)
    assert trained.num_tokens == 4


def test_reward_of_a_trajectory_without_rows_is_in_the_baseline() -> None:
    trained = make_train_batch(Batch(groups=[group((0.0, []), (1.0, [SEQUENCE]), (1.0, [SEQUENCE]))]))
    # Mean 2/3, population deviation sqrt(2)/3.
    assert trained.sequences[0].advantages == pytest.approx([2**-0.5] * 2, abs=1e-5)


@pytest.mark.parametrize("case", ["advantages", "middle"])
def test_group_whose_tokens_all_have_advantage_zero_is_dead(case: str) -> None:
    """Rewards that differ do not help: the client gave zeros, or only the trajectory at the mean can be trained."""
    if case == "advantages":
        zeros = SEQUENCE.model_copy(update={"advantages": {2: 0.0, 3: 0.0}})
        dead = group((1.0, [zeros]), (0.0, [zeros]))
    else:
        dead = group((0.0, []), (1.0, [SEQUENCE]), (2.0, []))
    live = group((1.0, [SEQUENCE]), (0.0, [SEQUENCE]))
    trained = make_train_batch(Batch(groups=[dead, live]))
    assert (trained.num_groups_trainable, trained.num_tokens) == (1, 4)


def test_masked_rows_leave_a_group_without_signal() -> None:
    cut = SEQUENCE.model_copy(update={"truncated": True})
    config = TrainConfig(overlong="mask")
    dead = group((0.0, [cut]), (1.0, [cut]))
    assert not has_signal(dead, config) and has_signal(dead, TrainConfig())
    trained = make_train_batch(Batch(groups=[dead]), config)
    assert (trained.num_groups_trainable, trained.num_trajectories_masked) == (0, 2)


def test_soft_penalty_alone_is_a_signal() -> None:
    """Equal rewards, of which one is lowered for its length: the job's report and the trainer agree."""
    config = TrainConfig(overlong="soft_penalty", overlong_length=2, overlong_buffer=1)
    short = TokenSequence(token_ids=[5, 6], logprobs=[None, -1.0])
    equal = group((1.0, [SEQUENCE]), (1.0, [short]))
    assert has_signal(equal, config) and not has_signal(equal)
    assert make_train_batch(Batch(groups=[equal]), config).num_groups_trainable == 1


def test_groups_that_are_left_out_do_not_count_in_the_scale_of_a_batch() -> None:
    cut = SEQUENCE.model_copy(update={"truncated": True})
    config = TrainConfig(preset="ppo", overlong="mask")
    one = group((1.0, [SEQUENCE]), (0.0, [SEQUENCE]))
    alone = make_train_batch(Batch(groups=[one]), config)
    both = make_train_batch(Batch(groups=[one, group((100.0, [cut]), (0.0, [cut]))]), config)
    assert [sequence.advantages for sequence in both.sequences] == [sequence.advantages for sequence in alone.sequences]
    assert alone.sequences[0].advantages == pytest.approx([1.0, 1.0], abs=1e-5)


def test_a_penalty_lowers_rewards_also_where_only_turns_give_a_signal() -> None:
    """By hand: outcomes -0 and -5 are +1 and -1 in standard deviations, turns are +1 and -1."""
    turns = [SEQUENCE.model_copy(update={"rewards": [(3, reward)]}) for reward in (1.0, 0.0)]
    batch = Batch(groups=[group((0.0, [turns[0]]), (0.0, [turns[1]]))])
    for penalties, expected in (([0.0, 5.0], (2.0, -2.0)), ([5.0, 0.0], (0.0, 0.0))):
        trained = make_train_batch(batch, TrainConfig(), penalties)
        advantages = [sequence.advantages for sequence in trained.sequences]
        assert advantages == [pytest.approx([advantage, advantage], abs=1e-4) for advantage in expected]


def test_a_penalty_for_kl_leaves_the_trained_groups_as_they_are() -> None:
    """Sequences keep their numbers in the step: the rewards 2 and 0, lowered by 2 and 0, are equal."""
    for config in (TrainConfig(), TrainConfig(baseline="none", scaling="batch_std")):
        batch = Batch(groups=[group((2.0, [SEQUENCE]), (0.0, [SEQUENCE]))])
        trained = make_train_batch(batch, config, [2.0, 0.0])
        assert [sequence.advantages for sequence in trained.sequences] == [[0.0, 0.0]] * 2


def test_the_soft_penalty_counts_tokens_that_are_too_stale() -> None:
    """As the job's report did: both trajectories are as long, so that there is no signal."""
    stale = SEQUENCE.model_copy(update={"spans": [SampledSpan(start=2, stop=3, step=1)]})
    batch = Batch(groups=[group((1.0, [stale]), (1.0, [SEQUENCE]))])
    config = TrainConfig(overlong="soft_penalty", overlong_length=2, overlong_buffer=2)
    kept, num_dropped = drop_stale(with_penalties(batch, config), 2)
    assert num_dropped == 1 and not make_train_batch(kept, TrainConfig()).sequences
    assert [trajectory.reward for trajectory in kept.groups[0].trajectories] == [0.0, 0.0]
