"""A wrong value in a configuration is one line, with what the field takes. What the line names is taken."""

import ast
import re
from collections.abc import Callable
from typing import Any

import pytest

import art
from art_protocol.wire import LossConfig

KINDS = (art.TrainConfig, art.LoRAConfig, art.TrainSFTConfig)
FIELDS = [(kind, name) for kind in KINDS for name in kind.model_fields]
WRONG: tuple[Any, ...] = (object(), -1, -0.5, 0, 1e9, "nonsense", [], [-1.0], None, {})
TOGETHER: dict[str, dict[str, Any]] = {
    "schedule": {"schedule_steps": 9},
    "overlong": {"overlong_length": 9, "overlong_buffer": 3},
    "ratio_to": {"correction": "off"},
    "baseline": {"scaling": "batch_std"},
    "correction_low": {"correction_high": 1e9},
}
"""Values of other fields that a value of this field needs."""


def refusal(kind: Callable[..., Any], name: str, value: Any) -> str | None:
    """The error's text; None if the value is taken."""
    try:
        kind(**{**TOGETHER.get(name, {}), name: value})
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_each_field_has_one_line_with_its_range(kind: type[Any], name: str) -> None:
    texts = [text for value in WRONG if (text := refusal(kind, name, value)) is not None]
    assert texts
    for text in texts:
        assert "\n" not in text and text.startswith(f"{kind.__name__}: {name} is "), text


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_what_the_line_names_is_taken(kind: type[Any], name: str) -> None:
    text = refusal(kind, name, object())
    assert text is not None
    said = text.partition("it must be ")[2]
    for quoted in re.findall(r"'[^']*'|\bNone\b|\bTrue\b|\bFalse\b", said):
        assert refusal(kind, name, ast.literal_eval(quoted)) is None, quoted
    single = said.partition("a list")[0]
    for limit in re.findall(r"at (?:least|most) ([\d.]+)", single):
        assert refusal(kind, name, float(limit)) is None, limit
    for limit in re.findall(r"above ([\d.]+)", single):
        assert refusal(kind, name, float(limit)) is not None


def test_the_fields_of_the_loss_are_among_them() -> None:
    assert LossConfig.model_fields.keys() < art.TrainConfig.model_fields.keys()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"learning_rate": -1},
            "TrainConfig: learning_rate is -1: it must be a number above 0 and at most 1, a list of numbers of at least 0 and at "
            "most 1 or 'auto'",
        ),
        ({"passes": 65}, "TrainConfig: passes is 65: it must be an integer of at least 1 and at most 64"),
        (
            {"clip": "both", "epsilon": "x"},
            "TrainConfig: clip is 'both': it must be 'two_sided', 'dual', 'cispo' or 'none'; epsilon is 'x': it must be a number "
            "above 0",
        ),
        (
            {"batch_size": 2, "mini_batches": 2},
            "TrainConfig: batch_size and mini_batches both divide the groups: give one of them",
        ),
        ({"learning_rte": 1}, "TrainConfig has no field 'learning_rte': did you mean 'learning_rate'?"),
    ],
)
def test_the_line_as_it_is(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as refused:
        art.TrainConfig(**fields)
    assert str(refused.value) == text
    with pytest.raises(ValueError, match=re.escape(text)):
        art.TrainConfig.model_validate(fields)
