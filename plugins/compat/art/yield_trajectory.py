"""ART's path of `art.yield_trajectory`, which is a function as well. An import would put the module into its place, so the
function takes the place of the module, with the module's names."""

import sys
from typing import Any, cast

from art.compat.yielding import capture_yielded_trajectory, yield_trajectory

__all__ = ["capture_yielded_trajectory", "yield_trajectory"]

_function = cast(Any, yield_trajectory)
_function.capture_yielded_trajectory = capture_yielded_trajectory
_function.yield_trajectory = yield_trajectory
sys.modules[__name__] = _function
