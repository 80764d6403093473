"""Programs without an ending as modules."""

import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType

from scripts.import_graph import ROOT


def load_script(file: str) -> ModuleType:
    name = Path(file).name
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / file))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
