"""ART's path of `art.LocalBackend`."""

from art_compat.local import LocalBackend

__all__ = ["LocalBackend"]
