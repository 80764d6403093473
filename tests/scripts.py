"""Programs of scripts/ as modules."""

import importlib.machinery
import importlib.util
from types import ModuleType

from scripts.import_graph import ROOT


def load_script(name: str) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / "scripts" / name))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
