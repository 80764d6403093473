"""The size of the house stays within limits; `scripts/measure` prints it."""

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


MEASURE = load_script("measure")

LONG_FOR_A_REASON = {
    "art_server.trainer.step.train": "the steps of a job in their order: load, plan, compute, update, save",
    "art_server.trainer.step.compute_gradient": "the algorithm of an optimizer step",
    "art_server.trainer.loss.policy_loss": "the formula, with its sources",
    "art_server.device.plan._make": "one page of arithmetic, in which each figure follows from those above",
}
MAX_IMPORTS = 14


def test_functions_over_fifty_lines_have_a_reason() -> None:
    found = {f"{each.module}.{each.name}" for each in MEASURE.long_functions()}
    assert found == LONG_FOR_A_REASON.keys()


def test_no_module_imports_from_everywhere() -> None:
    """The package `art` itself is the list of the client's public names."""
    wide = [module for module, number in MEASURE.widest_imports() if number > MAX_IMPORTS]
    assert wide in ([], ["art"]), wide


def test_rooms_beside_the_core_keep_their_budgets() -> None:
    """As docs/architecture.md states them."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    lines = MEASURE.lines_by_room()
    for part in MEASURE.BESIDE_THE_CORE:
        (row,) = (row for row in page.splitlines() if row.startswith(f"| {part}"))
        budget = int(row.split("|")[2].replace(",", ""))
        assert sum(number for (of, _), number in lines.items() if of == part) <= budget, part
