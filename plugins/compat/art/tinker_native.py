"""ART's path of names that are refused here."""

from art_compat.refused import TinkerNativeBackend

__all__ = ["TinkerNativeBackend"]
