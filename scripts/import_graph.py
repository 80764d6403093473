"""The import graph of our modules, read from the code, with imports inside functions and under TYPE_CHECKING.

`import art` imports no annex: the module `art` names what annexes have, imports a name at its first use, and shows the imports to
type checkers alone. So the graph leaves these imports out.
"""

import ast
import functools
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "art": ROOT / "art_client" / "art",
    "art_protocol": ROOT / "art_client" / "art_protocol",
    "art_server": ROOT / "art_server",
    "art_watch": ROOT / "art_watch",
}
"""The packages of the core."""
ANNEXES = {folder.name: folder for folder in sorted((ROOT / "plugins").iterdir()) if folder.is_dir()}
"""The folders of annexes. Each has a folder `art`, a part of the client's package, or a package of its own."""

PROCESSES = {"the server": "", "the trainer's process": "trainer", "vLLM's processes": "engine/vllm_process"}
"""Each process with the folder that runs only in it. All other folders belong to the server or are shared."""

NEEDED = {"finetune": {"rewards"}}
"""The annexes whose names in `art` an annex uses: rewards and judges, `art.rewards`."""

WATCH = ("art_watch", "art_watch/terminal")

Graph = Mapping[str, frozenset[str]]


@functools.cache
def modules() -> Mapping[str, Path]:
    """Maps the dotted names of our modules to their files."""
    files: dict[str, Path] = {}
    for folder in (*PACKAGES.values(), *ANNEXES.values()):
        root = folder if folder in ANNEXES.values() else folder.parent
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(root).with_suffix("").parts
            if parts[0] not in ("scripts", "tests"):
                files.setdefault(".".join(parts).removesuffix(".__init__"), file)
    return files


def our_packages() -> set[str]:
    return {module.partition(".")[0] for module in modules()}


@functools.cache
def imported_names(file: Path) -> frozenset[str]:
    """The dotted names that a file imports: modules, and names inside modules."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def type_checkers_names(file: Path) -> dict[str, str]:
    """The names that a file imports for type checkers alone, in the block `if TYPE_CHECKING` at its top, with their modules:
    `from art.pipeline import PipelineTrainer -> {"PipelineTrainer": "art.pipeline"}`, `import art.dev as _dev -> {"_dev": "art.dev"}`."""
    names: dict[str, str] = {}
    for statement in ast.parse(file.read_text()).body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            for node in statement.body:
                if isinstance(node, ast.Import):
                    names |= {alias.asname or alias.name: alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module is not None:
                    names |= {alias.name: node.module for alias in node.names}
    return names


def names_of_art(file: Path) -> set[str]:
    """The names that a file takes from `art`: `art.evaluate`, `from art import evaluate`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "art":
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module == "art":
            names |= {alias.name for alias in node.names}
    return names


@functools.cache
def import_graph() -> Graph:
    """Maps each of our modules to the modules of ours that it imports."""
    files = modules()
    graph: dict[str, frozenset[str]] = {}
    for module, file in files.items():
        names = imported_names(file)
        if module == "art":
            hidden = type_checkers_names(file)
            names -= {f"{source}.{name}" for name, source in hidden.items()} | set(hidden.values())
        ours = {name if name in files else name.rpartition(".")[0] for name in names}
        graph[module] = frozenset(ours & files.keys()) - {module}
    return graph


def foreign_packages(file: Path) -> set[str]:
    """The packages that a file imports and that are neither ours nor Python's."""
    packages = {name.partition(".")[0] for name in imported_names(file)}
    return packages - sys.stdlib_module_names - our_packages()


def room(module: str) -> str:
    """The room of a module: the folder of the server that contains the module (a file at the server's top is a separate room),
    else the module's annex, else the module's package. The terminal of `art_watch`, which runs in separate processes, is a
    separate room."""
    if module not in modules() or module == "art_server":
        return module.partition(".")[0]
    file = modules()[module]
    for annex, folder in ANNEXES.items():
        if file.is_relative_to(folder):
            return annex
    package = module.partition(".")[0]
    server = PACKAGES["art_server"]
    if file.is_relative_to(server):
        return file.stem if file.parent == server else file.parent.relative_to(server).as_posix()
    return f"{package}/terminal" if file.parent.name == "terminal" else package


def circles(graph: Graph) -> list[set[str]]:
    """Import cycles: groups of modules that all import each other, directly or indirectly."""
    reached = {module: reach(graph, module) for module in graph}
    groups = {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in graph
        if module in reached[module]
    }
    return sorted(map(set, groups), key=sorted)


def reach(graph: Graph, start: str) -> set[str]:
    reached: set[str] = set()
    ahead = [start]
    while ahead:
        new = graph[ahead.pop()] - reached
        reached |= new
        ahead += new
    return reached


def picture() -> str:
    """A Mermaid diagram of the server's folders and their imports. Arrows that others imply are omitted."""
    rooms: dict[str, set[str]] = {}
    for module, imported in import_graph().items():
        rooms.setdefault(room(module), set()).update(map(room, imported))
    drawn = {name for name in rooms if (PACKAGES["art_server"] / name).is_dir()} | {
        "server",
        "art",
        "art_protocol",
        *WATCH,
        *ANNEXES,
    }
    arrows = {name: frozenset(rooms[name] & drawn) - {name} for name in sorted(drawn)}
    lines = ["```mermaid", "flowchart TD"]
    for process, alone in PROCESSES.items():
        of_server = drawn - {*PROCESSES.values(), "shared", *PACKAGES, *WATCH, *ANNEXES}
        inside = [alone] if alone else sorted(of_server)
        lines += [f'    subgraph {_node(alone) or "server"}_process["{process}"]']
        lines += [*(f'        {_node(name)}["{name}"]' for name in inside), "    end"]
    for source, to in arrows.items():
        implied = {far for near in to for far in reach(arrows, near)}
        lines += [f"    {_node(source)} --> {_node(other)}" for other in sorted(to - implied)]
    return "\n".join([*lines, "```"])


def _node(room_name: str) -> str:
    """A room's name in Mermaid, which takes no slash."""
    return room_name.replace("/", "_")
