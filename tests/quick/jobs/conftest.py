"""The folders of examples are pytest's, as those of the ledger."""

from tests.quick.ledger.conftest import folders_of_examples

__all__ = ["folders_of_examples"]
