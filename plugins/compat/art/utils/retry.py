"""The module from which programs written for ART import `retry`."""

from art.retrying import retry

__all__ = ["retry"]
