"""The parser of the commands `art-server`, `art-server host` and `art`: an error is one line, with the flag that was meant."""

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Never

LIKENESS = 0.7
"""The least likeness of a flag that is suggested, from 0 to 1. `--prot` and `--port` have 0.75, `--seed` and `--step` 0.5."""


class Parser(argparse.ArgumentParser):
    """argparse's parser, which prints no usage before an error."""

    other_words: Mapping[str, str] = {}
    """Flags and commands of other programs, with what they are here."""

    def error(self, message: str) -> Never:
        """Ends the process with status 2 and one line."""
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice is not None:
            message += self._meant(choice[1], re.findall(r"[\w-]+", choice[2]))
        self.exit(2, f"{self.prog}: {message} (`{self.prog} --help` lists the flags)\n")

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] - argparse has several signatures
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """As argparse does, after a check of the flags' names, which argparse checks last."""
        words: list[str] = list(sys.argv[1:] if args is None else args)
        if self._subparsers is None:  # else a command checks its own flags
            for word in words[: words.index("--") if "--" in words else None]:
                self._check_flag(word.partition("=")[0])
        return super().parse_known_args(words, namespace)

    def _check_flag(self, word: str) -> None:
        known = self._option_string_actions
        if word.startswith("--") and not any(flag.startswith(word) for flag in known):
            self.error(f"there is no flag {word}{self._meant(word, known)}")

    def _meant(self, word: str, known: Iterable[str]) -> str:
        if word in self.other_words:
            return f": here it is {self.other_words[word]}"
        flags = {flag.lstrip("-"): flag for flag in known}  # without hyphens, which make all flags alike
        near = difflib.get_close_matches(word.lstrip("-"), flags, n=1, cutoff=LIKENESS)
        return f": did you mean {flags[near[0]]}?" if near else ""
