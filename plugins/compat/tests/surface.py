"""ART's names, as scripts/compatibility reads them."""

import importlib
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


SCRIPT = load_script("compatibility")


ENTRIES = SCRIPT.read_surface()


VERDICTS = {entry: SCRIPT.verdict(entry) for entry in ENTRIES}
