"""Import paths of ART's releases for modules that are elsewhere here, such as `art.local.backend` for `art.local`."""

import sys


def alias(module: str, *names: str) -> None:
    """Makes `import NAME` return `module`, which is loaded already, for each of the names."""
    for name in names:
        sys.modules[name] = sys.modules[module]
