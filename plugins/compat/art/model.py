"""ART's path of `art.Model` and `art.TrainableModel`."""

from art_compat.models import Model, TrainableModel

__all__ = ["Model", "TrainableModel"]
