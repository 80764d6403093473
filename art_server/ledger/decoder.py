"""The base model's tokenizer for the ledger: it decodes sampled tokens and knows the tokens that end a turn."""

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

logger = logging.getLogger(__name__)


class Decoder:
    """Decodes token ids, special tokens included. Without a tokenizer.json it cannot decode, and splicing is off."""

    def __init__(self, folder: Path, stop_ids: Iterable[int], behind_answer: str = ""):
        """`stop_ids` are the tokens at which the engine stops. `behind_answer` is the text that the chat template writes after
        an answer. If this text begins with a special token, that token also ends a turn."""
        file = folder / "tokenizer.json"
        self._tokenizer = Tokenizer.from_file(str(file)) if file.exists() else None
        if self._tokenizer is None:
            logger.warning("%s has no tokenizer.json: prompts are not spliced", folder)
        of_template = self._find_opening_special(behind_answer)
        of_tokenizer = self._find_end_token(folder)
        self.end_id = of_tokenizer if of_template is None else of_template
        """The special token that the chat template writes behind an answer; without one, the tokenizer's end-of-sequence
        token; None if unknown."""
        known = {token_id for token_id in (of_template, of_tokenizer) if token_id is not None}
        self.stop_ids = frozenset(stop_ids)
        self.end_ids = self.stop_ids | known

    @property
    def can_decode(self) -> bool:
        return self._tokenizer is not None and bool(self.end_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        assert self._tokenizer is not None, "check can_decode first"
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text within an answer."""
        assert self._tokenizer is not None, "check can_decode first"
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode_behind(self, token_ids: Sequence[int], before: int | None) -> str:
        """The text of tokens that follow the token `before`: some tokenizers drop white space at a text's beginning."""
        if before is not None:
            opening = self.decode([before])
            whole = self.decode([before, *token_ids])
            if whole.startswith(opening):
                return whole[len(opening) :]
        return self.decode(token_ids)

    def is_space(self, token_id: int) -> bool:
        return not self.decode([token_id]).strip()

    def _find_end_token(self, folder: Path) -> int | None:
        file = folder / "tokenizer_config.json"
        if self._tokenizer is None or not file.exists():
            return None
        token = json.loads(file.read_text()).get("eos_token")
        if isinstance(token, dict):
            token = token.get("content")
        return self._tokenizer.token_to_id(token) if isinstance(token, str) else None

    def _find_opening_special(self, text: str) -> int | None:
        """The longest special token that a text begins with; None if there is none."""
        if self._tokenizer is None:
            return None
        longest, opening_id = 0, None
        for token_id, token in self._tokenizer.get_added_tokens_decoder().items():
            if token.special and text.startswith(token.content) and len(token.content) > longest:
                longest, opening_id = len(token.content), token_id
        return opening_id
