"""What became of each turn, in the trajectories file, for people who read rollouts."""

import gzip
import json

from hypothesis import given
from hypothesis import strategies as st

from art_protocol.wire import TrainConfig, TrajectoryGroupBody
from art_server.jobs.received_trajectories import ReceivedTrajectories
from art_server.jobs.turns import ResolvedTurn, TurnTrace, join_turns
from tests.makers.resolving import LIMITS, Resolved, bare, choice, record, resolve, sources


def run(*trajectories: dict, find=lambda _: None) -> tuple[Resolved, TrajectoryGroupBody]:
    group = TrajectoryGroupBody.model_validate({"trajectories": list(trajectories)})
    return resolve([group], TrainConfig(), "p/a", sources(find_record=find), LIMITS), group


def test_each_turn_has_its_origin_its_place_and_how_it_continues() -> None:
    first, second = choice([1, 2], [3, 4]), choice([1, 2, 3, 4, 5], [6])
    rewritten = choice([1, 9], [7])
    entries = [{"role": "user", "content": "q"}, first, {"role": "user", "content": "r"}, second]
    resolved, _ = run({"messages_and_choices": [*entries, rewritten], "reward": 1.0})
    assert resolved.traces == [
        [
            [
                TurnTrace(0, 1, "ids", sequence=0, start=2, stop=4),
                TurnTrace(0, 3, "ids", continues="joined", sequence=0, start=5, stop=6),
                TurnTrace(0, 4, "ids", continues="changed", sequence=1, start=2, stop=3),
            ]
        ]
    ]
    assert resolved.batch.groups[0].number == 0


def test_a_dropped_turn_has_its_reason_and_a_side_history_its_number() -> None:
    other = {"messages_and_choices": [bare("c-1")]}
    resolved, group = run(
        {
            "messages_and_choices": [bare("unknown"), choice([1], [2])],
            "additional_histories": [other],
            "reward": 0.0,
        },
        {"messages_and_choices": [bare("unknown")], "reward": 1.0},
        find=lambda key: record(key, [5], [6, 7]) if key == "c-1" else None,
    )
    (one, two) = resolved.traces[0]
    assert [(trace.history, trace.entry, trace.origin) for trace in one] == [
        (0, 0, None),
        (0, 1, "ids"),
        (1, 0, "ledger"),
    ]
    assert one[0].dropped is not None and two[0].dropped == one[0].dropped
    assert (one[2].sequence, one[2].start, one[2].stop, one[2].step) == (1, 1, 3, 0)

    rollouts = ReceivedTrajectories()
    rollouts.add(group, [[trace.as_json() for trace in turns] for turns in resolved.traces[0]])
    (line,) = gzip.decompress(rollouts.content).splitlines()
    stored = json.loads(line)["trajectories"]
    assert stored[0]["turns"][0] == {"history": 0, "entry": 0, "dropped": one[0].dropped}
    assert [turn["entry"] for turn in stored[0]["turns"]] == [0, 1, 0]


def test_groups_without_a_trainable_turn_leave_a_gap_in_the_numbers() -> None:
    groups = [
        TrajectoryGroupBody.model_validate({"trajectories": [{"messages_and_choices": entries, "reward": 1.0}]})
        for entries in ([bare("unknown")], [choice([1], [2])])
    ]
    resolved = resolve(groups, TrainConfig(), "p/a", sources(), LIMITS)
    assert [group.number for group in resolved.batch.groups] == [1]
    assert len(resolved.traces) == 2


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), min_size=1, max_size=4),
            st.lists(st.integers(0, 3), min_size=1, max_size=3),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_a_place_holds_exactly_the_turn_s_sampled_tokens(
    steps: list[tuple[list[int], list[int], bool]],
) -> None:
    turns: list[ResolvedTurn] = []
    so_far: list[int] = []
    for context, tokens, continues in steps:
        prompt = so_far + context if continues else context
        turns.append(ResolvedTurn(prompt, tokens, [-1.0] * len(tokens), "ids"))
        so_far = prompt + tokens
    sequences, spans = join_turns(turns)
    for turn, span in zip(turns, spans, strict=True):
        sequence = sequences[span.sequence].token_ids
        assert sequence[span.start : span.stop] == turn.token_ids
        assert sequence[: span.start] == turn.prompt_token_ids
