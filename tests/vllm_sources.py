"""What vLLM's sources define, read without importing them, and what our own code takes from vLLM."""

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from art_server.engine.command import SWITCHES
from art_server.settings import ENGINE_ARGS
from art_server.shared.vllm_names import NAMES

ROOT = Path(__file__).parents[1]
OURS = ROOT / "art_server"


class Sources:
    """The sources of one version of vLLM."""

    def __init__(self, folder: Path):
        self._folder = folder
        """The folder that contains the package `vllm`."""
        self._tree = functools.cache(self._parse)
        self._text = functools.cache(self._read)

    def has(self, module: str, name: str) -> bool:
        """Whether a module has a function, class or variable, or a class of the module `Class.attribute`."""
        return bool(self._definitions(module, name))

    def parameters(self, module: str, name: str) -> list[str] | None:
        """The parameters of a function or method, as text; None if the name is something else."""
        functions = [node for node in self._definitions(module, name) if isinstance(node, FUNCTIONS)]
        return [ast.unparse(function.args) for function in functions] or None

    def changed_functions(self, other: "Sources") -> list[str]:
        """The listed functions that have other parameters in another version."""
        listed = [(module, name) for module, names in NAMES.items() for name in names]
        return [
            f"{module}:{name}({', '.join(self.parameters(module, name) or ())})"
            for module, name in listed
            if self.parameters(module, name) != other.parameters(module, name)
        ]

    def mentions(self, module: str, name: str, used: str) -> bool:
        """Whether the code of a function contains a name."""
        return any(
            used in (getattr(node, "id", None), getattr(node, "attr", None))
            for function in self._definitions(module, name)
            for node in ast.walk(function)
        )

    def contains(self, text: str, part: str) -> bool:
        """Whether a file of vLLM, or a file below a folder, contains a text."""
        return text in self._text(part)

    def _read(self, part: str) -> str:
        path = self._folder / "vllm" / part
        return "".join(file.read_text() for file in ([path] if path.is_file() else path.rglob("*.py")))

    def _package(self, module: str) -> str:
        is_package = self._folder.joinpath(*module.split(".")).is_dir()
        return module if is_package else module.rpartition(".")[0]

    def _parse(self, module: str) -> ast.Module | None:
        path = self._folder.joinpath(*module.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        return ast.parse(file.read_text()) if file.is_file() else None

    def _definitions(self, module: str, name: str) -> list[ast.AST]:
        """The nodes that define a name. An imported name is followed if vLLM has its module."""
        owner, _, attribute = name.partition(".")
        if attribute:
            return [
                node
                for definition in self._definitions(module, owner)
                if isinstance(definition, ast.ClassDef)
                for node in self._members(module, owner, definition, attribute)
            ]
        tree = self._tree(module)
        nodes: list[ast.AST] = []
        for node in _outside_functions(tree.body) if tree is not None else ():
            if name in _bound(node):
                nodes.append(node)
            for source, original in _imported(node, self._package(module), name):
                nodes += (self._definitions(source, original) if source != module else []) or [node]
        return nodes

    def _members(self, module: str, owner: str, definition: ast.ClassDef, attribute: str) -> list[ast.AST]:
        nodes = [node for node in _outside_functions(definition.body) if attribute in _bound(node)]
        nodes += [node for node in ast.walk(definition) if _sets_attribute(node, attribute)]
        if nodes:
            return nodes
        for base in definition.bases:
            name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            if name != owner:
                nodes += self._definitions(module, f"{name.rpartition('.')[2]}.{attribute}")
        return nodes


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _outside_functions(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module or class, also those under `if`, `try` and `with`."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            blocks = [statement.body, getattr(statement, "orelse", []), getattr(statement, "finalbody", [])]
            blocks += [handler.body for handler in getattr(statement, "handlers", [])]
            for block in blocks:
                yield from _outside_functions(block)


def _bound(node: ast.AST) -> set[str]:
    """The names that a statement defines, without imports."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {name.id for target in targets if target for name in ast.walk(target) if isinstance(name, ast.Name)}


def _imported(node: ast.AST, package: str, name: str) -> Iterator[tuple[str, str]]:
    """The module and the original name of a name that a module of a package imports; no original name for a module."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if name == (alias.asname or alias.name):
                yield alias.name, ""
    if isinstance(node, ast.ImportFrom):
        # `from ..base import x` is relative to the package.
        parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
        module = ".".join([*parents, *([node.module] if node.module else [])])
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                yield module, alias.name


def _sets_attribute(node: ast.AST, attribute: str) -> bool:
    """Whether a node is `self.attribute` on the left of an assignment."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr == attribute
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def installed_folder() -> Path:
    """The folder of the installed vLLM, which is not imported."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None, "scripts/setup installs vLLM"
    return Path(spec.origin).parents[1]


def absences(sources: Sources) -> list[str]:
    """What the server takes from vLLM and these sources do not have: names, environment variables, routes and flags."""
    absent = [f"{module}:{name}" for module, names in NAMES.items() for name in names if not sources.has(module, name)]
    for module, name, used in replaced_functions():
        if used and not sources.mentions(module, name, used):
            absent.append(f"{module}:{name} without {used}")
    absent += [name for name in _texts(r"\bVLLM_[A-Z_0-9]+") if not sources.contains(name, "envs.py")]
    routes = _texts(r'(?<=")/[a-z][a-z_0-9/]*(?=[?"])', OURS / "engine" / "engine.py")
    absent += [route for route in routes if not sources.contains(f'"{route}"', "entrypoints")]
    absent += [f"--{flag}" for flag in _flags() if not _has_flag(sources, flag)]
    return absent


FLAG_CLASSES = (
    ("vllm.engine.arg_utils", "AsyncEngineArgs"),
    ("vllm.entrypoints.launchers.cli_args", "FrontendArgs"),  # 0.32
    ("vllm.entrypoints.common.cli_args", "FrontendArgs"),  # 0.33
)
"""The classes from whose fields vLLM makes its flags."""


# --- what our code takes -------------------------------------------------------------------------------------------


def taken_names() -> set[tuple[str, str]]:
    """The module and name of everything that the server imports from vLLM, reads from what it imported, or replaces."""
    return {name for file in OURS.rglob("*.py") for name in taken_from(ast.parse(file.read_text()))}


def _texts(pattern: str, folder: Path = OURS) -> set[str]:
    """What a pattern matches in our modules, or in one of them."""
    files = [folder] if folder.is_file() else folder.rglob("*.py")
    return {match for file in files for match in re.findall(pattern, file.read_text())}


def _flags() -> set[str]:
    """vLLM's flags that the server passes, without the dashes before them."""
    texts: set[object] = set()
    for node in ast.walk(ast.parse((OURS / "engine" / "command.py").read_text())):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.Dict):
            parts += node.keys
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "arguments":
            parts.append(node.slice)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "switches.append":
            parts += node.args
        elif isinstance(node, ast.List):
            parts += node.elts
        texts |= {part.value for part in parts if isinstance(part, ast.Constant)}
    written = {str(text).removeprefix("--") for text in texts}
    return {*SWITCHES, *ENGINE_ARGS, *(text for text in written if re.fullmatch(r"[a-z]+(-[a-z]+)*", text))}


def _has_flag(sources: Sources, flag: str) -> bool:
    field = flag.replace("-", "_")
    return any(sources.has(module, f"{kind}.{field}") for module, kind in FLAG_CLASSES)


def replaced_functions() -> set[tuple[str, str, str]]:
    """The module and name of each function that the server replaces only if the function mentions a name, and that name."""
    return {use for file in OURS.rglob("*.py") for use in _uses(ast.parse(file.read_text()))}


def taken_from(tree: ast.Module) -> set[tuple[str, str]]:
    """The module and name of everything that a module of ours imports from vLLM, reads from what it imported, or replaces."""
    imports = _imports(tree)
    taken = {source for source in imports.values() if source[1]}
    for node in ast.walk(tree):
        if (path := _path(node)) and path[0] in imports and len(path) > 1:
            taken.add(_named(imports[path[0]], path[1:]))
    return taken | {(module, name) for module, name, _ in _uses(tree)}


def _uses(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """The calls of `patch_target(owner, name, uses=...)` whose owner and name are written there."""
    imports = _imports(tree)
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "patch_target"):
            continue
        owner, name = _path(node.args[0]), node.args[1]
        if owner and owner[0] in imports and isinstance(name, ast.Constant):
            uses = [ast.literal_eval(keyword.value) for keyword in node.keywords]
            yield *_named(imports[owner[0]], (*owner[1:], str(name.value))), "".join(uses)


def _imports(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """By local name: the module of vLLM, and the name in the module, empty for the module itself."""
    names: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                names[alias.asname or alias.name] = (
                    (module, "") if _is_module(module) else (node.module or "", alias.name)
                )
        elif isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "vllm" for alias in node.names), "import names from vLLM"
    # Another local name of what was imported: `runner_class: Any = gpu_model_runner.GPUModelRunner`.
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            path = _path(node.value)
            if isinstance(target, ast.Name) and path and path[0] in names:
                names[target.id] = _named(names[path[0]], path[1:])
    return names


def _is_module(module: str) -> bool:
    path = installed_folder().joinpath(*module.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def _named(source: tuple[str, str], path: tuple[str, ...]) -> tuple[str, str]:
    """A name of at most two parts: what a function's or an attribute's attributes are is not vLLM's."""
    module, name = source
    return module, ".".join([*([name] if name else []), *path][:2])


def _path(node: ast.AST) -> tuple[str, ...]:
    """`a.b.c` -> ('a', 'b', 'c'); empty for other expressions."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute) and (before := _path(node.value)):
        return (*before, node.attr)
    return ()
