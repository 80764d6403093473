"""docs/train-config.md is made from the code, and explains every field."""

from pathlib import Path

from art_protocol.wire import LossConfig, TrainConfig
from scripts import train_config

PAGE = Path(__file__).parents[3] / "docs" / "train-config.md"


def test_the_page_is_that_of_the_code() -> None:
    assert PAGE.read_text() == train_config.page(), "run scripts/pages"


def test_every_field_is_explained() -> None:
    meanings = train_config.docstrings(TrainConfig) | train_config.docstrings(LossConfig)
    assert TrainConfig.model_fields.keys() == meanings.keys()
