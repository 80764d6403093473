"""ART's path of the costs of answers; see `art.metrics`."""

from art.metrics import TokenPricing, track_api_cost

__all__ = ["TokenPricing", "track_api_cost"]
