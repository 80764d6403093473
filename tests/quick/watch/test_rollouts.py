"""The readers of rollouts and of token records, against the files and against independent computations."""

import gzip
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from art_server.errors import NotFound
from art_server.store.model_folder import ModelFolder
from art_watch import rollouts, tokens
from tests.makers.demo import make_demo
from tests.makers.demo_groups import CHANGED, DEAD, FAILED, HOSTILE, HOSTILE_GROUP
from tests.refusals import refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    (folder,) = make_demo(tmp_path_factory.mktemp("demo"), runs=1, steps=5, rollouts=48)
    return folder


def lines_of(folder: ModelFolder, split: str = "train", step: int = 1) -> list[dict[str, Any]]:
    content = gzip.decompress(folder.trajectories_file(split, step).read_bytes())
    return [json.loads(line) for line in content.splitlines()]


def write(tmp_path: Path, *lines: bytes) -> ModelFolder:
    folder = ModelFolder(tmp_path, "p", "a")
    file = folder.trajectories_file("train", 1)
    file.parent.mkdir(parents=True)
    file.write_bytes(gzip.compress(b"".join(line + b"\n" for line in lines)))
    return folder


def test_an_overview_folds_white_space(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "a\n\n  b"}, {"role": "assistant", "content": "\n\n c \t d\n"}]
    folder = write(tmp_path, json.dumps({"trajectories": [{"messages": said, "reward": 1.0}]}).encode())
    (group,) = rollouts.groups(folder, "train", 1)
    assert (group["prompt"], group["rollouts"][0]["text"]) == ("a b", "c d")


def test_groups_have_the_rewards_of_the_file(folder: ModelFolder) -> None:
    groups, written = rollouts.groups(folder, "train", 1), lines_of(folder)
    assert [group["index"] for group in groups] == list(range(len(written)))
    for group, line in zip(groups, written, strict=True):
        rewards = [trajectory["reward"] for trajectory in line["trajectories"]]
        assert [rollout["reward"] for rollout in group["rollouts"]] == rewards
        assert group["mean"] == pytest.approx(statistics.fmean(rewards))
        assert group["std"] == pytest.approx(statistics.pstdev(rewards))
        assert group["metadata"] == line["metadata"]
        assert group["failures"] == line["exceptions"]
        assert group["prompt"] == line["trajectories"][0]["messages"][1]["content"], "the first user message"
    assert [group["index"] for group in groups if group["is_dead"]] == [DEAD]
    assert [group["index"] for group in groups if group["failures"]] == [FAILED]
    one = rollouts.rollout(folder, "train", 1, 0, 2)
    assert (one["reward"], one["group_mean"]) == (groups[0]["rollouts"][2]["reward"], groups[0]["mean"])
    first = groups[0]["rollouts"][3]
    assert first["finish_reason"] == "length" and first["num_turns"] == 2
    assert first["origins"] == ["ids", "ledger"]
    choices = [entry for entry in written[0]["trajectories"][3]["messages"] if "message" in entry]
    assert first["num_tokens"] == sum(len(choice["token_ids"]) for choice in choices)


@pytest.mark.parametrize(
    ("fields", "is_dead"),
    [
        ({}, True),
        ({"turn_rewards": [0.5, None, 0.5]}, True),
        ({"turn_rewards": [0.5, 1.0]}, False),
        ({"reward": 1.0000001}, True),
        ({"reward": 1.00001}, False),
        ({"turn_rewards": [0.5, 0.50000003]}, True),
        ({"turn_advantages": [[0.0, 0.0]]}, True),
        ({"turn_advantages": [0.0, None]}, True),
        ({"turn_advantages": [1.0]}, False),
        ({"additional_histories": [{"turn_advantages": [[0.5, -0.5]]}]}, False),
        ({"turns": [{"history": 0, "entry": 1}]}, True),
        ({"turns": [{"history": 0, "entry": 1, "is_taught": True}]}, False),
    ],
    ids=str,
)
def test_a_training_group_is_dead_where_nothing_in_it_trains(
    tmp_path: Path, fields: dict[str, Any], is_dead: bool
) -> None:
    line = json.dumps({"trajectories": [{"reward": 1.0}, {"reward": 1.0, **fields}]}).encode()
    folder = write(tmp_path, line)
    (group,) = rollouts.groups(folder, "train", 1)
    assert group["is_dead"] == is_dead
    (folder.path / "trajectories" / "train").rename(folder.path / "trajectories" / "val")
    (group,) = rollouts.groups(folder, "val", 1)
    assert not group["is_dead"], "it was not meant to train"


def test_turns_and_tokens_of_additional_histories_count(tmp_path: Path) -> None:
    def choice(text: str, num_tokens: int) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        return {"message": message, "finish_reason": text, "art": {"num_tokens": num_tokens}}

    more = [{"messages_and_choices": [choice("b", 1), choice("c", 2)]}, {}]
    trajectory = {"messages": [choice("a", 2)], "additional_histories": more}
    (group,) = rollouts.groups(write(tmp_path, json.dumps({"trajectories": [trajectory]}).encode()), "train", 1)
    (row,) = group["rollouts"]
    assert (row["num_turns"], row["num_tokens"]) == (3, 5)
    assert (row["text"], row["finish_reason"]) == ("a", "a")


def test_text_is_searched_in_messages_and_tool_calls_in_any_case(folder: ModelFolder) -> None:
    groups = rollouts.groups(folder, "train", 1, text="WINDOW.washit")
    assert [group["index"] for group in groups] == [HOSTILE_GROUP]
    assert len(groups[0]["rollouts"]) == 8
    assert len(rollouts.groups(folder, "train", 1, text="search {")) == 6, "a call's name"
    some = rollouts.groups(folder, "train", 1, text="TP 1276 at 143")
    wanted: list[tuple[int, int]] = []
    for index, line in enumerate(lines_of(folder)):
        for number, trajectory in enumerate(line["trajectories"]):
            if "TP 1276 at 143" in trajectory["messages"][-1]["message"]["content"]:
                wanted.append((index, number))
    assert [(group["index"], rollout["index"]) for group in some for rollout in group["rollouts"]] == wanted
    assert wanted and rollouts.groups(folder, "train", 1, text="nowhere") == []


def test_a_rollout_has_its_messages_traces_and_tokens(folder: ModelFolder) -> None:
    rollout = rollouts.rollout(folder, "train", 1, CHANGED, 1)
    written = lines_of(folder)[CHANGED]["trajectories"][1]
    assert rollout["reward"] == written["reward"] and rollout["num_rollouts"] == 8
    (history,) = rollout["histories"]
    roles = [entry["role"] for entry in history["entries"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    call = history["entries"][2]
    assert call["tool_calls"][0]["name"] == "search"
    assert call["sampled_by"]["step"] == 11
    assert call["turn"] == written["turns"][0] and history["entries"][0]["turn"] is None
    assert history["entries"][4]["turn"]["continues"] == "changed"
    for entry in (history["entries"][2], history["entries"][4]):
        turn = entry["turn"]
        sequence = rollout["sequences"][turn["sequence"]]
        span = slice(turn["start"], turn["stop"])
        written_entry = written["messages"][turn["entry"]]
        assert sequence["ids"][span] == written_entry["token_ids"]
        assert all(value is not None for value in sequence["sampled_logprobs"][span])
        assert "".join(sequence["texts"][span]).startswith(entry["text"][:20])


def test_numbers_of_tokens_are_those_of_the_record(folder: ModelFolder) -> None:
    tensors = load_file(folder.tokens_file(1))
    rollout = rollouts.rollout(folder, "train", 1, 0, 2)
    with tokens.opened_tokens(folder, "train", 1) as record:
        assert record is not None
        ((start, stop),) = record.groups[0][2]
    (sequence,) = rollout["sequences"]
    assert sequence["ids"] == tensors["token_ids_T"][start:stop].tolist()
    for name in tokens.NUMBERS:
        written = tensors[f"{name}_T"][start:stop]
        assert [value is None for value in sequence[name]] == np.isnan(written).tolist()
        shown = [np.nan if value is None else value for value in sequence[name]]
        np.testing.assert_allclose(shown, written, atol=1e-5)
    assert sequence["is_clipped"] == tensors["is_clipped_T"][start:stop].astype(bool).tolist()


def test_a_dead_group_was_sampled_and_not_trained(folder: ModelFolder) -> None:
    (sequence,) = rollouts.rollout(folder, "train", 1, DEAD, 0)["sequences"]
    assert any(value is not None for value in sequence["sampled_logprobs"])
    assert all(value is None for value in sequence["trainer_logprobs"])


def test_a_rollout_without_a_record_has_no_tokens(folder: ModelFolder) -> None:
    rollout = rollouts.rollout(folder, "val", 5, 0, 0)
    assert not rollout["has_token_record"] and rollout["sequences"] == []
    assert rollout["histories"][0]["entries"][4]["turn"] is None


def test_what_is_not_there_is_not_found(folder: ModelFolder, tmp_path: Path) -> None:
    for call in (
        lambda: rollouts.groups(folder, "train", 99),
        lambda: rollouts.groups(folder, "test", 1),
        lambda: rollouts.rollout(folder, "train", 99, 0, 0),
        lambda: rollouts.rollout(folder, "train", 1, 99, 0),
        lambda: rollouts.rollout(folder, "train", 1, 0, 99),
        lambda: tokens.tree(folder, 99, 0),
        lambda: tokens.tree(folder, 1, 99),
        lambda: tokens.tree(ModelFolder(tmp_path, "p", "a"), 1, 0),
    ):
        with pytest.raises(NotFound):
            call()


def test_a_line_that_a_crash_cut_short_keeps_its_place(tmp_path: Path) -> None:
    good = json.dumps({"trajectories": [{"messages": [], "reward": 0.5}]}).encode()
    folder = write(tmp_path, good[:20], b"[]", good)
    groups = rollouts.groups(folder, "train", 1)
    assert [(group["index"], group["is_unreadable"]) for group in groups] == [
        (0, True),
        (1, True),
        (2, False),
    ]
    assert groups[2]["rollouts"][0]["reward"] == 0.5
    assert rollouts.rollout(folder, "train", 1, 2, 0)["reward"] == 0.5
    with refused(NotFound, "unknown_group", "group"):
        rollouts.rollout(folder, "train", 1, 0, 0)


def test_the_rollouts_of_a_group_are_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = json.dumps({"trajectories": [{"messages": [], "reward": n} for n in range(8)]}).encode()
    folder, parsed = write(tmp_path, line), list[bytes]()
    read = rollouts.read_json
    monkeypatch.setattr(rollouts, "read_json", lambda line: (parsed.append(line), read(line))[1])
    rewards = [rollouts.rollout(folder, "train", 1, 0, index)["reward"] for index in range(8)]
    assert rewards == list(range(8)) and len(parsed) == 1
    folder.trajectories_file("train", 1).write_bytes(gzip.compress(line.replace(b"7", b"7.5")))
    assert rollouts.rollout(folder, "train", 1, 0, 7)["reward"] == 7.5
    folder.trajectories_file("train", 1).unlink()
    with pytest.raises(NotFound):
        rollouts.rollout(folder, "train", 1, 0, 7)


FIELDS = [
    "additional_histories",
    "arguments",
    "art",
    "content",
    "entry",
    "exceptions",
    "finish_reason",
    "function",
    "history",
    "logs",
    "message",
    "messages",
    "messages_and_choices",
    "metrics",
    "name",
    "origin",
    "reward",
    "role",
    "text",
    "num_tokens",
    "tool_calls",
    "trajectories",
    "turn_advantages",
    "turn_rewards",
    "turns",
]
json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(FIELDS),
            inner,
            max_size=5,
        )
    ),
    max_leaves=25,
)


@given(json_values)
@settings(max_examples=80)
def test_any_json_in_a_trajectories_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, value: Any
) -> None:
    line = json.dumps({"trajectories": [value, {"messages": [value], "turns": [value]}]})
    folder = write(tmp_path_factory.mktemp("any"), json.dumps(value).encode(), line.encode())
    for group in rollouts.groups(folder, "train", 1, text=""):
        for row in group["rollouts"]:
            rollout = rollouts.rollout(folder, "train", 1, group["index"], row["index"])
            assert rollout["num_rollouts"] == len(group["rollouts"])
    rollouts.groups(folder, "train", 1, text="x")


def test_contents_of_several_parts_are_text() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert rollouts.plain_text([{"type": "text", "text": HOSTILE}, image]) == f"{HOSTILE}\n[image_url]"
    assert rollouts.plain_text(None) == "" and rollouts.plain_text({"a": 1}) == '{"a": 1}'


@pytest.mark.parametrize("content", [b"", b"\x08", b"junk" * 100])
def test_a_broken_record_is_named_with_the_remedy(tmp_path: Path, content: bytes) -> None:
    folder = write(tmp_path, b'{"trajectories": [{"messages": [], "reward": 1}]}')
    file = folder.tokens_file(1)
    file.parent.mkdir()
    file.write_bytes(content)
    for read in (
        lambda: rollouts.rollout(folder, "train", 1, 0, 0),
        lambda: tokens.tree(folder, 1, 0),
    ):
        with refused(NotFound, "broken_record", "step"):
            read()


groups_of_sequences = st.lists(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=2), max_size=6)


def write_record(root: Path, group: list[list[list[int]]], trained: list[bool]) -> ModelFolder:
    folder = ModelFolder(root, "p", "a")
    folder.tokens_file(1).parent.mkdir(parents=True)
    ids = [token for trajectory in group for sequence in trajectory for token in sequence]
    lengths = [len(sequence) for trajectory in group for sequence in trajectory]
    bounds = list(itertools.accumulate(lengths, initial=0))
    spans = iter(itertools.pairwise(bounds))
    described = [{"number": 4, "trajectories": [[next(spans) for _ in trajectory] for trajectory in group]}]
    marks = [0.5 if is_trained else np.nan for is_trained in trained[: len(ids)]]
    numbers = dict.fromkeys((f"{name}_T" for name in tokens.NUMBERS), np.array(marks, np.float32))
    tensors = {"token_ids_T": np.array(ids, np.int32), "is_clipped_T": np.zeros(len(ids), np.uint8)}
    texts = {0: "a", 1: "b"}
    metadata = {"groups": json.dumps(described), "texts": json.dumps(texts)}
    save_file(tensors | numbers, folder.tokens_file(1), metadata)
    return folder


@given(groups_of_sequences, st.lists(st.booleans(), min_size=108, max_size=108))
@settings(max_examples=60)
def test_a_tree_has_each_shared_prefix_once(
    tmp_path_factory: pytest.TempPathFactory, group: list[list[list[int]]], trained: list[bool]
) -> None:
    folder = write_record(tmp_path_factory.mktemp("tree"), group, trained)
    tree = tokens.tree(folder, 1, 4)
    sequences = [(number, sequence) for number, trajectory in enumerate(group) for sequence in trajectory]
    prefixes = [tuple(sequence[: n + 1]) for _, sequence in sequences for n in range(len(sequence))]
    assert tree["num_tree_tokens"] == len(set(prefixes))
    assert tree["num_sequence_tokens"] == sum(len(sequence) for _, sequence in sequences)
    nodes = tree["nodes"]
    trained_prefixes = set(itertools.compress(prefixes, trained))
    assert sum(node["num_trained"] for node in nodes) == len(trained_prefixes)
    paths = {None: ""}
    for node in nodes:
        parent = node["parent"]
        assert node["start"] == (0 if parent is None else nodes[parent]["stop"])
        assert parent is None or parent < node["id"], "the parent comes first"
        paths[node["id"]] = paths[parent] + node["text"]
    spelled = {2: "⟨2⟩", 0: "a", 1: "b"}
    for number, sequence in sequences:
        text = "".join(spelled[token] for token in sequence)
        on_path = [n for n in nodes if number in n["rollouts"] and text.startswith(paths[n["id"]])]
        assert sum(node["stop"] - node["start"] for node in on_path) >= len(sequence)
    for node in nodes:
        size = node["stop"] - node["start"]
        spans = node["trained"]
        assert all(node["start"] <= a < b <= node["stop"] for a, b in spans)
        assert sum(b - a for a, b in spans) == node["num_trained"] <= size
        of_node: set[int] = set()
        for number, sequence in sequences:
            if "".join(spelled[token] for token in sequence[: node["stop"]]) == paths[node["id"]]:
                of_node.add(number)
        assert node["rollouts"] == sorted(of_node)
