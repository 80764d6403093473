"""The reward plot."""

import struct

from art.finetune.plot import draw
from art.finetune.run_record import EpochRow, State, ValidationRow, reward_figures


def epoch(number: int, mean: float | None = 0.5, trained: float | None = 0.6) -> EpochRow:
    return EpochRow(
        epoch=number,
        run_id="run",
        **reward_figures([] if mean is None else [mean]),
        num_trajectories=8,
        num_groups=2,
        filtered_trajectories=4,
        filtered_groups=1,
        **reward_figures([] if trained is None else [trained], "filtered_"),
        curriculum_percentile=0.3,
        step=number + 1,
    )


def picture(epochs: list[EpochRow], validations: list[ValidationRow]) -> bytes:
    return draw(State(config={}, epochs=epochs, validations=validations))


VALIDATION = ValidationRow(epoch=0, avg_reward=0.4, num_examples=64, interval=(0.34, 0.46))


def test_the_picture_has_the_size_of_nvidias() -> None:
    drawn = picture([epoch(number, 0.3 + 0.05 * number) for number in range(10)], [VALIDATION])
    assert drawn.startswith(b"\x89PNG") and drawn.endswith(b"IEND\xaeB`\x82")
    assert struct.unpack(">II", drawn[16:24]) == (1800, 1050)


def test_each_figure_is_seen() -> None:
    two = [epoch(0), epoch(1, 0.9)]
    pictures = {
        picture(two, []),
        picture([epoch(0), epoch(1, 0.8)], []),
        picture([epoch(0), epoch(1, 0.9, 0.7)], []),
        picture(two, [VALIDATION]),
        picture(two, [VALIDATION.model_copy(update={"interval": None})]),
    }
    assert len(pictures) == 5


def test_epochs_and_validations_without_rewards_are_gaps() -> None:
    failed = ValidationRow(epoch=0, error="the server stopped")
    assert picture([epoch(0), epoch(1, None, None)], [failed]) == picture([epoch(0)], [])
    assert picture([epoch(0, None, None)], []).startswith(b"\x89PNG")
