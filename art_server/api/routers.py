"""All routers of the server but the inference routes, which come first."""

from art_server.api import art_wire, checkpoints, control, look, metrics

ROUTERS = (control.router, checkpoints.router, art_wire.router, look.router, metrics.router)
