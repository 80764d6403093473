"""`filter_rename_model_split`: the rows of some models and splits."""

from collections.abc import Iterable

import polars as pl

from art.utils.benchmarking.types import BenchmarkModelKey


def filter_rename_model_split(df: pl.DataFrame, models: Iterable[BenchmarkModelKey]) -> pl.DataFrame:
    """The rows of each key's model and split, with its display name as `model`."""
    parts = [
        df.filter((pl.col("model") == key.name) & (pl.col("split") == key.split)).with_columns(
            pl.lit(key.display_name).alias("model")
        )
        for key in models
    ]
    # polars refuses to concatenate an empty list.
    return pl.concat(parts) if parts else df.clear()
