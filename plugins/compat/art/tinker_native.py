"""ART's path of names that are refused here."""

from art.compat.refused import TinkerNativeBackend

__all__ = ["TinkerNativeBackend"]
