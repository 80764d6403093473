"""ART's module `art.yield_trajectory`. `art.yield_trajectory` is a function as well, and an import of the module would replace
the function. So the function is put into `sys.modules` instead of the module, with the module's names as attributes."""

import sys
from typing import Any, cast

from art_compat.yielding import capture_yielded_trajectory, yield_trajectory

__all__ = ["capture_yielded_trajectory", "yield_trajectory"]

_function = cast(Any, yield_trajectory)
_function.capture_yielded_trajectory = capture_yielded_trajectory
_function.yield_trajectory = yield_trajectory
sys.modules[__name__] = _function
