"""Import paths of ART's releases for modules that are elsewhere here, such as `art.local.backend` for `art.local`."""

import sys


def alias(module: str, *names: str) -> None:
    """Makes `import NAME` give the module, which is loaded."""
    for name in names:
        sys.modules[name] = sys.modules[module]
