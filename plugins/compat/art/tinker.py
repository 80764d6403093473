"""ART's path of names that are refused here."""

from art.compat.refused import TinkerBackend

__all__ = ["TinkerBackend"]
