"""Texts that every program can encode."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_server.shared.engine_messages import whole_characters


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        (r'"\ud83c"', r'"\ufffd"'),
        (r'"\uDF89 \uD83C"', r'"\ufffd \ufffd"'),
        (r'"\ud83c\udf89"', r'"\ud83c\udf89"'),
        (r'"\ud83c\ud83c\udf89"', r'"\ufffd\ud83c\udf89"'),
        (r'"\\ud83c"', r'"\\ud83c"'),
        (r'"\\\ud83c"', r'"\\\ufffd"'),
        ('"\ud83c"', '"\ufffd"'),
        ('"\U0001f389 é"', '"\U0001f389 é"'),
        ("", ""),
    ],
)
def test_halves_of_surrogate_pairs_are_replaced(text: str, whole: str) -> None:
    assert whole_characters(text) == whole


@given(st.text(alphabet=st.characters(categories=["Cs", "Lu", "So"]) | st.sampled_from('\\u"')))
def test_what_is_sent_can_be_encoded_and_read(text: str) -> None:
    for written in (json.dumps(text), json.dumps(text, ensure_ascii=False)):
        sent = whole_characters(written)
        sent.encode()
        json.loads(sent).encode()
        if not any("\ud800" <= character <= "\udfff" for character in text):
            assert json.loads(sent) == text
