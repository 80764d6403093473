"""ART's path of `art.auto_trajectory`, which is a function as well. An import would put the module into its place, so the
function takes the place of the module, with the module's names."""

import sys
from typing import Any, cast

from art.compat.capturing import auto_trajectory, capture_auto_trajectory

__all__ = ["auto_trajectory", "capture_auto_trajectory"]

_function = cast(Any, auto_trajectory)
_function.auto_trajectory = auto_trajectory
_function.capture_auto_trajectory = capture_auto_trajectory
sys.modules[__name__] = _function
