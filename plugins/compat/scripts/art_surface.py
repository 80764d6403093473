"""The public surface of releases of openpipe-art, and what ART's own programs use of it.

Both are read from the syntax of the sources. Nothing of ART is imported or run, and only facts leave this module: names,
kinds, versions, and numbers of programs. `plugins/compat/scripts/compatibility` writes them to plugins/compat/tests/art_surface.json.

The home of a name is the shortest path under which a release has the name. Other paths are entries of kind "path". Keywords are
written `art.retry(max_attempts)`, fields and methods `art.Trajectory.reward`. Where a class takes its fields as keywords, only
the field is listed.
"""

import ast
import hashlib
import json
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

INTERNAL = {
    "art.adapter_leases art.distributed art.local.adapter_leases art.local.checkpoints art.local.pack art.local.service "
    "art.local.tokenize art.loss art.megatron. art.preprocessing art.runtime_diagnostics art.serving_capabilities "
    "art.token_prefix art.torchtune art.trainer_rank art.transformers art.unsloth art.vllm art.vllm_route_transport "
    "art.vllm_runtime": "ART's trainer, engine and their processes",
    "art.pipeline_tuner. art.pipeline_trainer.binary_prefix_tool_pipeline art.pipeline_trainer.state "
    "art.pipeline_trainer.status art.pipeline_trainer.yes_no_maybe_pipeline": "parts and demonstrations of `PipelineTrainer`",
    "art.client art.serverless.client art.tau_bench art.tinker. art.tinker_native.": "clients of vendors' services",
    "art.cli art.skypilot.stop_server art.utils.trajectory_migration": "commands",
    "art.test": "tests",
    "art.langgraph.logging art.langgraph.message_utils art.metrics_taxonomy art.skypilot.utils art.utils.append_only "
    "art.utils.cache_dirs art.utils.chat_template art.utils.convert_moe_lora art.utils.group_aggregate art.utils.grpo "
    "art.utils.lifecycle art.utils.managed_process art.utils.model_config art.utils.network art.utils.s3_checkpoint_utils "
    "art.utils.safetensors art.utils.suppress_litellm_serialization_warnings art.utils.wandb_sdk": "helpers of the modules above "
    "and of the client",
}
"""Modules without entries, with the reason. A dot at the end means only the modules below: the names that the package
itself exports are entries, without their members."""

Definition: TypeAlias = tuple[str, str]
"""The module that defines a name, and the name."""

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
RECORDS = ("BaseModel", "TypedDict", "NamedTuple", "dataclass")
PYDANTIC = {"model_copy", "model_dump", "model_dump_json"}
"""Methods of every pydantic class, which some classes of ART override."""
VALIDATORS = {
    "field_serializer",
    "field_validator",
    "model_serializer",
    "model_validator",
    "setter",
}
CONSTRUCTORS = ("__init__", "__new__")
NOT_CONSTANTS = {"TypeVar", "ParamSpec", "ContextVar", "getLogger"}
PRIVATE_BUT_USED = {"_internal_config"}
TYPE_STATEMENT = re.compile(r"^type (\w+)(\[[^\]]*\])? =", re.MULTILINE)
TYPE_PARAMETERS = re.compile(r"^(\s*(?:async )?(?:def|class) \w+)\[[^\]]*\]", re.MULTILINE)


def parse(text: str) -> ast.Module:
    """The syntax tree of a module. Syntax of Python 3.12, which newer releases have, is put in older form."""
    text = TYPE_PARAMETERS.sub(r"\1", TYPE_STATEMENT.sub(r"\1 =", text))
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    tree = compile(text, "ART", "exec", flags, dont_inherit=True)
    assert isinstance(tree, ast.Module)
    return tree


def is_internal(module: str) -> bool:
    beginnings = (prefix for prefixes in INTERNAL for prefix in prefixes.split())
    return any(f"{module}.".startswith(f"{prefix.rstrip('.')}.") and module != prefix[:-1] for prefix in beginnings)


# --- one release ------------------------------------------------------------------------------------------------------


class Release:
    """The modules of one release, and the names that they define or import."""

    def __init__(self, folder: Path) -> None:
        files = {
            ".".join(("art", *file.relative_to(folder).with_suffix("").parts)): file
            for file in sorted(folder.rglob("*.py"))
        }
        self._packages = {name.removesuffix(".__init__") for name in files if name.endswith(".__init__")}
        self._files = {name.removesuffix(".__init__"): file for name, file in files.items()}
        self._trees: dict[str, ast.Module] = {}

    def public_modules(self) -> list[str]:
        return [
            module
            for module in self._files
            if not is_internal(module) and not any(part.startswith("_") for part in module.split("."))
        ]

    def names(self, module: str) -> dict[str, Definition]:
        """The public names of a module: what it defines, what it lists in `__all__`, and what a package imports."""
        tree = self._tree(module)
        listed = _listed(tree)
        definitions: dict[str, Definition] = {}
        for node in _statements(tree.body):
            if isinstance(node, ast.ClassDef | Function):
                definitions[node.name] = (module, node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                is_constant = _is_constant(node)
                names = [
                    target for target in _targets(node) if target in listed or (is_constant and target[0].isupper())
                ]
                definitions |= {name: (module, name) for name in names}
            elif isinstance(node, ast.ImportFrom):
                imported = {alias.asname or alias.name for alias in node.names}
                for name in imported if module in self._packages else imported & listed:
                    definitions |= self._named(name, self.find(module, name))
        for name in listed - definitions.keys():
            definitions |= self._named(name, self._find_lazy(module, name))
        is_open = module != "art"  # names that `art` does not list serve its own start
        return {
            name: definition
            for name, definition in definitions.items()
            if not name.startswith("_") and (is_open or name in listed)
        }

    def find(self, module: str, name: str, seen: frozenset[Definition] = frozenset()) -> Definition | None:
        """The definition of a module's name; None if the name is defined outside of this release."""
        if module not in self._files or (module, name) in seen:
            return None
        definition: Definition | None = None
        for node in _statements(self._tree(module).body):
            if (isinstance(node, ast.ClassDef | Function) and node.name == name) or (
                isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node)
            ):
                definition = (module, name)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        source = self._source(module, node)
                        definition = self.find(source, alias.name, seen | {(module, name)}) or definition
        return definition

    def nodes(self, definition: Definition) -> list[ast.ClassDef | Function]:
        """The definitions of a class or function, with its overloads."""
        module, name = definition
        nodes = _statements(self._tree(module).body)
        return [node for node in nodes if isinstance(node, ast.ClassDef | Function) and node.name == name]

    def bases(self, module: str, cls: ast.ClassDef) -> Iterator[Definition]:
        """The base classes that this release defines."""
        for base in cls.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(base, ast.Name) and (definition := self.find(module, base.id)) is not None:
                yield definition

    def is_record(self, module: str, cls: ast.ClassDef) -> bool:
        """Whether annotated names of the class are fields."""
        text = " ".join(ast.unparse(expression) for expression in (*cls.bases, *cls.decorator_list))
        return any(word in text for word in RECORDS) or any(
            isinstance(node, ast.ClassDef) and self.is_record(base[0], node)
            for base in self.bases(module, cls)
            for node in self.nodes(base)
        )

    def _named(self, name: str, definition: Definition | None) -> dict[str, Definition]:
        return {} if definition is None else {name: definition}

    def _find_lazy(self, module: str, name: str) -> Definition | None:
        """A name of `__all__` that a function of the module imports."""
        for node in ast.walk(self._tree(module)):
            if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
                return self.find(self._source(module, node), name)
        return None

    def _source(self, module: str, node: ast.ImportFrom) -> str:
        """The module that a statement imports from."""
        if not node.level:
            return node.module or ""
        base = module.split(".") if module in self._packages else module.split(".")[:-1]
        parts = base[: len(base) + 1 - node.level] + ([node.module] if node.module else [])
        return ".".join(parts)

    def _tree(self, module: str) -> ast.Module:
        if module not in self._trees:
            self._trees[module] = parse(self._files[module].read_text())
        return self._trees[module]


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, also those under `if` and `try`."""
    for node in body:
        if isinstance(node, ast.If):
            yield from _statements([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _statements(node.body)
        else:
            yield node


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _listed(tree: ast.Module) -> set[str]:
    """The names in `__all__`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and _targets(node) == ["__all__"]:
            return {str(child.value) for child in ast.walk(node.value) if isinstance(child, ast.Constant)}
    return set()


def _is_constant(node: ast.Assign | ast.AnnAssign) -> bool:
    called = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else ""
    return called.rpartition(".")[2] not in NOT_CONSTANTS


# --- all releases -----------------------------------------------------------------------------------------------------


@dataclass
class Entry:
    """A name, method, field or keyword."""

    kind: str
    """module, class, function, constant, method, attribute, field, keyword; path: another path of the name `of`."""
    of: str = ""
    versions: list[str] = field(default_factory=list[str])
    texts: set[str] = field(default_factory=set[str])
    """The programs that use the entry."""


class Surface:
    """The entries of all releases."""

    def __init__(self, releases: Mapping[str, Release]) -> None:
        self.entries: dict[str, Entry] = {}
        self.homes: dict[str, str] = {}
        self._bases: dict[str, list[str]] = defaultdict(list)
        self._releases = releases
        paths = {
            version: {
                f"{module}.{name}": definition
                for module in release.public_modules()
                for name, definition in release.names(module).items()
            }
            for version, release in releases.items()
        }
        self._choose_homes(paths.values())
        for version, release in releases.items():
            for module in release.public_modules():
                self._add(module, "module", version)
            for path, definition in sorted(paths[version].items()):
                self._add_name(version, path, definition, paths[version])

    def lineage(self, home: str) -> list[str]:
        """A class and its public base classes."""
        classes = [home]
        for cls in classes:
            classes += [base for base in self._bases.get(cls, []) if base not in classes]
        return classes

    def member(self, home: str, name: str) -> str | None:
        """The entry of a method or field of a class."""
        candidates = (f"{owner}.{name}" for owner in self.lineage(home))
        return next((candidate for candidate in candidates if candidate in self.entries), None)

    def keyword(self, home: str, name: str) -> str | None:
        """The entry of a keyword of a function, method or class."""
        for owner in self.lineage(home):
            if f"{owner}({name})" in self.entries:
                return f"{owner}({name})"
        return self.member(home, name) if self.entries[home].kind == "class" else None

    def add_imported(self, path: str) -> bool:
        """Adds a path that a program imports, from a module that itself imports the name."""
        module, _, name = path.rpartition(".")
        for version, release in self._releases.items():
            definition = None if is_internal(module) else release.find(module, name)
            if definition is not None and ".".join(definition) in self.homes:
                self.homes[path] = self.homes[".".join(definition)]
                self._add(path, "path", version, self.homes[path])
        return path in self.homes

    def _choose_homes(self, releases: Iterable[Mapping[str, Definition]]) -> None:
        """Paths of one definition in any release have the same home."""
        groups: dict[str, set[str]] = {}
        for paths in releases:
            of_definition: dict[Definition, set[str]] = defaultdict(set)
            for path, definition in paths.items():
                of_definition[definition].add(path)
            for group in of_definition.values():
                joined = group.union(*(groups.get(path, ()) for path in group))
                groups |= dict.fromkeys(joined, joined)
        for path, group in groups.items():
            self.homes[path] = min(group, key=lambda candidate: (candidate.count("."), len(candidate), candidate))

    def _add(self, name: str, kind: str, version: str, of: str = "") -> None:
        entry = self.entries.setdefault(name, Entry(kind, of))
        entry.kind, entry.of = kind, of
        if version not in entry.versions:
            entry.versions.append(version)

    def _add_name(self, version: str, path: str, definition: Definition, paths: Mapping[str, Definition]) -> None:
        home, release = self.homes[path], self._releases[version]
        nodes = release.nodes(definition)
        is_class = bool(nodes) and isinstance(nodes[-1], ast.ClassDef)
        if is_class:
            kind = "class"
        else:
            kind = "function" if nodes else "constant"
        self._add(path, *(("path", version, home) if path != home else (kind, version)))
        for node in [] if is_internal(definition[0]) else nodes:
            if isinstance(node, ast.ClassDef):
                self._add_class(version, home, definition[0], node, paths)
            else:
                self._add_keywords(version, home, node)

    def _add_class(
        self,
        version: str,
        home: str,
        module: str,
        cls: ast.ClassDef,
        paths: Mapping[str, Definition],
    ) -> None:
        release = self._releases[version]
        for base in release.bases(module, cls):
            public = next((path for path, definition in paths.items() if definition == base), None)
            if public is not None:
                self._bases[home].append(self.homes[public])
                continue
            for node in release.nodes(base):
                if isinstance(node, ast.ClassDef):
                    self._add_class(version, home, base[0], node, paths)
        if release.is_record(module, cls):
            for node in cls.body:
                if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation):
                    for name in filter(_is_public, _targets(node)):
                        self._add(f"{home}.{name}", "field", version)
        for node in cls.body:
            if isinstance(node, Function):
                self._add_method(version, home, node)

    def _add_method(self, version: str, home: str, node: Function) -> None:
        if node.name in CONSTRUCTORS:
            self._add_keywords(version, home, node)
        decorators = {ast.unparse(decorator).partition("(")[0].rpartition(".")[2] for decorator in node.decorator_list}
        if not _is_public(node.name) or node.name in PYDANTIC or decorators & VALIDATORS:
            return
        name = f"{home}.{node.name}"
        if decorators & {"property", "cached_property"}:
            return self._add(name, "attribute", version)
        self._add(name, "method", version)
        self._add_keywords(version, name, node)

    def _add_keywords(self, version: str, home: str, node: Function) -> None:
        names = {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)} - {"self", "cls"}
        for name in names:
            if not (node.name in CONSTRUCTORS and self.member(home, name)):
                self._add(f"{home}({name})", "keyword", version)


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name.startswith("_experimental") or name in PRIVATE_BUT_USED


# --- programs ---------------------------------------------------------------------------------------------------------

NOT_PROGRAMS = {"art", "mp_actors", "scripts", "src", "tests"}
"""Folders of a source distribution."""
BLOCK = re.compile(r"^([ \t]*)```(?:python|py)\b[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^([ \t]*)[%!].*", re.MULTILINE)
"""A line of a notebook that is not Python."""
PLACEHOLDER = re.compile(r"<([A-Z_]+)>")

CLASS_BY_VARIABLE = {
    "model": ("art.TrainableModel",),
    "backend": ("art.local.LocalBackend", "art.Backend", "art.skypilot.SkyPilotBackend"),
    "trajectory": ("art.Trajectory",),
    "traj": ("art.Trajectory",),
    "group": ("art.TrajectoryGroup",),
}
"""The class of a variable whose name ends with this word, if the program does not show the class."""
DICTIONARIES = {
    "_config": "art.dev.TrainConfig",
    "_internal_config": "art.dev.InternalModelConfig",
    "init_args": "art.dev.InitArgs",
    "engine_args": "art.dev.EngineArgs",
    "peft_args": "art.dev.PeftArgs",
    "trainer_args": "art.dev.TrainerArgs",
    "server_args": "art.dev.ServerArgs",
}
"""Keywords and attributes whose dictionary has the keys of a class."""
RESULTS = {
    "art.Model.backend": "art.Backend",
    "art.Model.metrics_builder": "art.metrics.MetricsBuilder",
    "art.Trajectory.finish": "art.Trajectory",
    "art.auto_trajectory": "art.Trajectory",
    "art.capture_auto_trajectory": "art.Trajectory",
    "art.gather_trajectories": "list art.Trajectory",
    "art.gather_trajectory_groups": "list art.TrajectoryGroup",
    "art.mcp.generate_scenarios": "art.mcp.GeneratedScenarioCollection",
    "art.rewards.ruler_score_group": "art.TrajectoryGroup",
    "art.skypilot.SkyPilotBackend.initialize_cluster": "art.skypilot.SkyPilotBackend",
    "art.utils.iterate_dataset": "list art.utils.iterate_dataset.DatasetBatch",
}
"""The class of a call's result. Before the class of a list's items is the word `list`."""
ITEMS = {
    "art.TrajectoryGroup": "art.Trajectory",
    "art.TrajectoryGroup.trajectories": "art.Trajectory",
}


def programs(folders: Iterable[Path]) -> Iterator[tuple[str, list[str]]]:
    """The examples, notebooks and pages with their code in blocks, each text once."""
    seen: set[bytes] = set()
    for folder in folders:
        for file in sorted(folder.rglob("*")):
            relative = file.relative_to(folder)
            if relative.parts[0] in NOT_PROGRAMS or not file.is_file():
                continue
            blocks = _blocks(file)
            digest = hashlib.sha256("\0".join(blocks).encode()).digest()
            if digest not in seen and any(re.search(r"\bart\b", block) for block in blocks):
                seen.add(digest)
                yield f"{folder.name}/{relative}", blocks


def _blocks(file: Path) -> list[str]:
    if file.suffix == ".py":
        return [file.read_text()]
    if file.suffix == ".ipynb":
        cells: list[Any] = json.loads(file.read_text() or "{}").get("cells", [])
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        return [COMMAND.sub(r"\1pass", source) for source in code if not source.startswith("%%html")]
    if file.suffix in (".md", ".mdx"):
        blocks = [textwrap.dedent(block) for _, block in BLOCK.findall(file.read_text())]
        return ["import art", *(PLACEHOLDER.sub(r"\1", block) for block in blocks)] if blocks else []
    return []


def read_program(blocks: Iterable[str]) -> tuple[list[ast.Module], int]:
    """The syntax trees of a program, and the number of blocks that are not Python."""
    trees: list[ast.Module] = []
    num_unread = 0
    for block in blocks:
        for text in (block, "if True:\n" + textwrap.indent(block, " ")):  # a part of a function
            try:
                trees.append(parse(text))
                break
            except SyntaxError:
                continue
        else:
            num_unread += 1
    return trees, num_unread


@dataclass(frozen=True)
class Value:
    """The meaning of an expression, as far as the program shows it: a name of ART, an instance of a class, or a list."""

    homes: tuple[str, ...]
    is_instance: bool = False
    is_list: bool = False


class Uses(ast.NodeVisitor):
    """The entries that one program uses."""

    def __init__(self, surface: Surface) -> None:
        self.surface = surface
        self.names: set[str] = set()
        self.internals: set[str] = set()
        self._variables: dict[str, Value] = {}

    def read(self, trees: Iterable[ast.Module]) -> None:
        trees = list(trees)
        for tree in (*trees, *trees):  # a function may be above the variable that it uses
            self.visit(tree)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            parts = alias.name.split(".")
            if parts[0] == "art":
                for end in range(1, len(parts) + 1):
                    self._use(".".join(parts[:end]))
                self._variables[alias.asname or "art"] = Value((alias.name if alias.asname else "art",))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or not node.module or node.module.partition(".")[0] != "art":
            return
        self._use(node.module)
        for alias in node.names:
            value = self._path(f"{node.module}.{alias.name}")
            if value is not None:
                self._variables[alias.asname or alias.name] = value

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self._value(node.value)
        for target in node.targets:
            self._bind(target, value)
            if isinstance(target, ast.Attribute):
                self._use_keys(target.attr, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._bind(node.target, self._annotated(node.annotation))
        self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> None:
        value = self._annotated(node.annotation)
        if value is not None:
            self._variables[node.arg] = value
        self.generic_visit(node)

    def visit_withitem(self, node: ast.withitem) -> None:
        self._bind(node.optional_vars, self._value(node.context_expr))
        self.generic_visit(node)

    def visit_For(self, node: ast.For | ast.AsyncFor | ast.comprehension) -> None:
        value = self._value(node.iter)
        if value is not None and value.is_list:
            self._bind(node.target, Value(value.homes, is_instance=True))
        elif value is not None and value.homes[0] in ITEMS:
            self._bind(node.target, Value((ITEMS[value.homes[0]],), is_instance=True))
        self.generic_visit(node)

    visit_AsyncFor = visit_For
    visit_comprehension = visit_For

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._value(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self._value(node)
        self.generic_visit(node)

    def _use(self, name: str) -> None:
        if name in self.surface.entries:
            self.names.add(name)
        elif is_internal(name):
            self.internals.add(name)

    def _path(self, path: str) -> Value | None:
        """A module, or a name of a module."""
        if path in self.surface.homes or self.surface.add_imported(path):
            self._use(path)
            self._use(self.surface.homes[path])
            return Value((self.surface.homes[path],))
        self._use(path)
        return Value((path,)) if path in self.surface.entries else None

    def _bind(self, target: ast.expr | None, value: Value | None) -> None:
        if isinstance(target, ast.Name) and value is not None and len(value.homes) == 1:
            self._variables[target.id] = value

    def _value(self, node: ast.expr | None) -> Value | None:
        if isinstance(node, ast.Name):
            return self._variables.get(node.id) or _by_name(node.id)
        if isinstance(node, ast.Await):
            return self._value(node.value)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Subscript):
            value = self._value(node.value)
            is_item = value is not None and value.is_list
            return Value(value.homes, is_instance=True) if value is not None and is_item else value
        return self._call(node) if isinstance(node, ast.Call) else None

    def _attribute(self, node: ast.Attribute) -> Value | None:
        value = self._value(node.value)
        if value is None or value.is_list:
            return _by_name(node.attr)
        kinds = [self.surface.entries[home].kind for home in value.homes if home in self.surface.entries]
        if not value.is_instance and kinds == ["module"]:
            return self._path(f"{value.homes[0]}.{node.attr}")
        for home in value.homes:
            member = self.surface.member(home, node.attr)
            if member is not None:
                self._use(member)
                return Value((member,))
        return None

    def _call(self, node: ast.Call) -> Value | None:
        value = self._value(node.func)
        if value is None or value.is_instance or value.homes[0] not in self.surface.entries:
            return None
        (home,) = value.homes
        for keyword in node.keywords:
            name = self.surface.keyword(home, keyword.arg or "")
            if name is not None:
                self._use(name)
                self._use_keys(keyword.arg or "", keyword.value)
        if self.surface.entries[home].kind == "class":
            return Value((home,), is_instance=True)
        words = RESULTS.get(home, "").split()
        return Value((words[-1],), is_instance=True, is_list=words[0] == "list") if words else None

    def _use_keys(self, name: str, value: ast.expr) -> None:
        """The keys of a dictionary of settings."""
        if name not in DICTIONARIES or not isinstance(value, ast.Dict):
            return
        for key, setting in zip(value.keys, value.values, strict=True):
            if isinstance(key, ast.Constant):
                self._use(f"{DICTIONARIES[name]}.{key.value}")
                self._use_keys(str(key.value), setting)

    def _annotated(self, node: ast.expr | None) -> Value | None:
        """The value of a variable with this annotation."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self._annotated(ast.parse(node.value, mode="eval").body)
        if isinstance(node, ast.BinOp):
            return self._annotated(node.left)
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).lower() in (
            "list",
            "iterable",
        ):
            value = self._annotated(node.slice)
            return None if value is None else Value(value.homes, is_list=True)
        value = self._value(node) if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) else None
        is_class = value is not None and self.surface.entries[value.homes[0]].kind == "class"
        return Value(value.homes, is_instance=True) if value is not None and is_class else None


def _by_name(name: str) -> Value | None:
    if name == "LocalBackend":  # pages of documentation do not always import the class
        return Value(("art.local.LocalBackend",))
    word = name.lower().rpartition("_")[2]
    homes = CLASS_BY_VARIABLE.get(word)
    return None if homes is None else Value(homes, is_instance=True)
