"""`SkyPilotBackend`: an art-server on a machine that SkyPilot rents. This import does not import SkyPilot."""

from art.skypilot.backend import SkyPilotBackend

__all__ = ["SkyPilotBackend"]
