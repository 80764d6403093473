"""How the rows of an epoch are divided into batches. A run samples a batch, and trains it as one step. Without `rows_per_step` a
batch is a whole epoch.

Batches are numbered from 0 over all epochs. Intervals in epochs, such as those of validations, count in rows.
"""

import math
import random
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Batches:
    num_rows: int
    """Rows of the data set."""
    rows_per_step: int | None = None
    """Rows of a batch; the last batch of an epoch may have fewer. None: all rows."""

    @property
    def per_epoch(self) -> int:
        """The number of batches of an epoch."""
        return 1 if self.rows_per_step is None else math.ceil(self.num_rows / self.rows_per_step)

    def epoch_of(self, number: int) -> int:
        """The epoch of a batch, from 0."""
        return number // self.per_epoch

    def position(self, number: int) -> dict[str, Any]:
        """The fields of a record that name a batch (`run_record.BatchRecord`)."""
        return {"epoch": self.epoch_of(number), "batch": None if self.rows_per_step is None else number}

    def rows_before(self, number: int) -> int:
        """The number of rows that a run samples before a batch."""
        epoch, index = divmod(number, self.per_epoch)
        return epoch * self.num_rows + index * (self.rows_per_step or 0)

    def num_intervals(self, number: int, interval: float) -> int:
        """The number of intervals that end before a batch. An interval is a number of epochs, such as 5 or 0.1."""
        return math.floor(round(self.rows_before(number) / (self.num_rows * interval), 9))

    def begins_interval(self, number: int, interval: float) -> bool:
        """Whether a batch is the first of the run, or the first after the end of an interval."""
        return number == 0 or self.num_intervals(number, interval) > self.num_intervals(number - 1, interval)

    def rows_of(self, number: int, seed: int) -> list[int]:
        """The indices of a batch's rows. The batches of an epoch have each row once, in an order that the seed and the epoch
        decide."""
        if self.rows_per_step is None:
            return list(range(self.num_rows))
        epoch, index = divmod(number, self.per_epoch)
        rows = random.Random(f"{seed}/rows/{epoch}").sample(range(self.num_rows), self.num_rows)
        return rows[index * self.rows_per_step : (index + 1) * self.rows_per_step]

    def title(self, number: int, num_epochs: int | None = None) -> str:
        """A batch in words: `"epoch 2"`, or `"epoch 2, rows 65 to 128"`; `"epoch 2/10"` with the number of all epochs."""
        epoch = f"epoch {self.epoch_of(number) + 1}" + (f"/{num_epochs}" if num_epochs else "")
        if self.rows_per_step is None:
            return epoch
        first = number % self.per_epoch * self.rows_per_step
        return f"{epoch}, rows {first + 1} to {min(first + self.rows_per_step, self.num_rows)}"

    def end(self, number: int) -> str:
        """The end of a batch in words: `"epoch 2"`, or `"64 of 128 training rows of epoch 2"` within an epoch."""
        epoch, index = divmod(number, self.per_epoch)
        if index + 1 == self.per_epoch:
            return f"epoch {epoch + 1}"
        return f"{(index + 1) * (self.rows_per_step or 0)} of {self.num_rows} training rows of epoch {epoch + 1}"


WHOLE_EPOCHS = Batches(num_rows=1)
"""Batches that are whole epochs, of any number of rows."""
