"""ART's path of `art.Backend`, and ART's names for the types of models."""

from art_compat.backends import Backend
from art_compat.models import Model, TrainableModel

__all__ = ["AnyModel", "AnyTrainableModel", "Backend"]

AnyModel = Model
AnyTrainableModel = TrainableModel
