"""The module from which newer releases of ART import `iterate_dataset`."""

from art.data import DatasetBatch, iterate_dataset

__all__ = ["DatasetBatch", "iterate_dataset"]
