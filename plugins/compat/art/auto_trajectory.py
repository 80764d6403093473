"""ART's module `art.auto_trajectory`. `art.auto_trajectory` is a function as well, and an import of the module would replace
the function. So the function is put into `sys.modules` instead of the module, with the module's names as attributes."""

import sys
from typing import Any, cast

from art_compat.coroutines import auto_trajectory, capture_auto_trajectory

__all__ = ["auto_trajectory", "capture_auto_trajectory"]

_function = cast(Any, auto_trajectory)
_function.auto_trajectory = auto_trajectory
_function.capture_auto_trajectory = capture_auto_trajectory
sys.modules[__name__] = _function
