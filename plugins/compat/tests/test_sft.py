"""`art.utils.sft`: the order, rates and files of a dataset."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

import art
from art.utils.sft import (
    create_lr_schedule,
    create_sft_dataset_iterator,
    get_file_row_count,
    iterate_file,
    train_sft_from_file,
)
from tests.quick.client.demonstrations import example, sent

pytestmark = pytest.mark.anyio


def test_schedules_by_hand() -> None:
    rates = create_lr_schedule(total_steps=4, peak_lr=1.0, method="linear", warmup_steps=2, min_lr=0.5)
    assert rates == [0.75, 1.0, 1.0, 0.5]
    assert create_lr_schedule(5, 1.0, "linear", warmup_steps=2) == [0.5, 1.0, 1.0, 0.5, 0.0]
    assert create_lr_schedule(3, 1.0, "cosine", min_lr=0.5) == pytest.approx([1.0, 0.75, 0.5])
    assert create_lr_schedule(3, 0.2, "constant") == [0.2] * 3
    assert create_lr_schedule(1, 0.2) == [0.2] and create_lr_schedule(0, 0.2) == []
    with pytest.raises(ValueError, match="'square'"):
        create_lr_schedule(1, 1.0, "square")  # type: ignore[arg-type]


def texts(trajectories: list[art.Trajectory]) -> list[Any]:
    return [trajectory.messages()[0].get("content") for trajectory in trajectories]


def test_chunks_cover_each_epoch_once_under_one_schedule() -> None:
    data = [example(str(number), "x") for number in range(7)]
    chunks = list(create_sft_dataset_iterator(data, chunk_size=2, epochs=2, batch_size=2, peak_lr=1.0))
    assert [(c.step, c.epoch, c.epoch_step) for c in chunks] == [
        (0, 0, 0),
        (2, 0, 2),
        (4, 1, 0),
        (6, 1, 2),
    ]
    for epoch in (0, 1):
        of_epoch = [chunk for chunk in chunks if chunk.epoch == epoch]
        shuffled = [text for chunk in of_epoch for text in texts(chunk.trajectories)]
        assert sorted(shuffled) == sorted(texts(data)) != shuffled
    rates = [rate for c in chunks for rate in c.config.learning_rate]  # type: ignore[union-attr]
    assert rates == create_lr_schedule(8, 1.0, "linear", warmup_steps=0)
    later = list(create_sft_dataset_iterator(data, chunk_size=2, epochs=2, batch_size=2, peak_lr=1.0, initial_step=4))
    assert [texts(c.trajectories) for c in later] == [texts(c.trajectories) for c in chunks[2:]]
    assert list(create_sft_dataset_iterator([])) == []


def test_an_interrupted_run_continues_at_the_chunk_of_its_step() -> None:
    """Each epoch of 25 steps ends with a short chunk."""

    def steps(initial_step: int) -> list[int]:
        data = [example(str(n), "a") for n in range(50)]
        return [c.step for c in create_sft_dataset_iterator(data, epochs=4, initial_step=initial_step)]

    assert steps(0) == [0, 10, 20, 25, 35, 45, 50, 60, 70, 75, 85, 95]
    for step in (0, 9, 10, 25, 47, 50, 99):
        first = max(first_step for first_step in steps(0) if first_step <= step)
        assert steps(step) == [first_step for first_step in steps(0) if first_step >= first]
    assert steps(100) == []


def test_a_file_is_read_in_an_order_that_the_seed_fixes(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    rows = [{"messages": [{"role": "user", "content": str(n)}], "tools": None} for n in range(20)]
    file.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    assert get_file_row_count(file_path=str(file)) == 20
    once, again = (texts(list(iterate_file(str(file), epochs=2))) for _ in range(2))
    assert once == again and once[:20] != once[20:]
    other = iterate_file(file_path=str(file), epochs=2, shuffle_buffer_size=20, seed=7, initial_skip=0)
    assert texts(list(other)) != once
    assert sorted(once[:20]) == sorted(once[20:]) == sorted(str(n) for n in range(20))
    assert texts(list(iterate_file(str(file), epochs=2, initial_skip=7))) == once[7:]
    small = texts(list(iterate_file(str(file), shuffle_buffer_size=3)))
    assert sorted(small) == sorted(once[:20]) and small[0] in {"0", "1", "2"}


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    for line in ("{", '{"text": 1}', "[]", '{"messages": 3}'):
        file.write_text('{"messages": []}\n' + line + "\n")
        with pytest.raises(ValueError, match=r"data\.jsonl, line 2"):
            list(iterate_file(str(file)))
    file.write_text('{"conversations": [{"from": "human", "value": "q"}]}\n')
    with pytest.raises(ValueError, match=r"data\.jsonl, line 1: .*ShareGPT"):
        list(iterate_file(str(file)))
    with pytest.raises(ValueError, match=r"data\.json "):
        list(iterate_file(str(tmp_path / "data.json")))


@pytest.mark.usefixtures("server_trains")
async def test_a_file_is_trained(server: Any, model: art.TrainableModel, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(
        "".join(
            example(str(n), "x")
            .model_dump_json(include={"messages_and_choices"})
            .replace("messages_and_choices", "messages")
            + "\n"
            for n in range(5)
        )
    )
    result = await train_sft_from_file(model, str(file), epochs=2, batch_size=2, initial_step=1, final_step=4)
    assert result is not None
    body = sent(server)
    expected = create_lr_schedule(math.ceil(10 / 2), 2e-4, "linear", 0)[1:4]
    assert body["config"]["learning_rate"] == pytest.approx(expected)
    assert len(body["groups"]) == 6 and body["config"]["batch_size"] == 2
    assert await train_sft_from_file(model, str(file), batch_size=5, initial_step=1) is None
