"""ART's path of names that are refused here."""

from art_compat.refused import TinkerBackend

__all__ = ["TinkerBackend"]
