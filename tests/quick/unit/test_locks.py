"""No lock of the server is held across a wait for the trainer, the engine or the device, whose steps take hours.

A registration, a fork, an upload or a deletion that holds such a lock makes everything behind it wait for a step. The
test reads the source: the body of each `async with LOCK` may await nothing that a running step delays.
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3] / "art_server"

LOCKS = (
    *("lock", "_lock", "_locks", "models_lock", "_turn", "_holding_device", "verify_lock", "_changed", "changed"),
    *("held", "held_idle"),
)
"""Names of locks, and of the functions that take one."""

SLOW = ("_trainer", "trainer", "_fleet", "fleet", "_engine", "engine", "_owner", "owner", "_gate", "gate")
"""Objects whose methods wait for a step, or for vLLM."""

OWN = {
    "models/base_loader.py BaseLoader._load": "the lock of the base model itself, which is engine and trainer",
    "models/base_loader.py BaseLoader._warm_trainer": "the device: the trainer allocates on it",
    "engine/engine.py Engine._load_alone": "the engine's list of adapters: one loads at a time",
    "engine/engine.py Engine._supervise": "the device: vLLM starts on it",
    "jobs/attempt.py Attempt._find_lost_layers": "the device: the trainer scores on it",
    "jobs/attempt.py Attempt._train": "the device: the step itself",
    "jobs/attempt.py Attempt._holding_device": "the device: the step itself",
    "jobs/gang.py Gang.run": "the trainer's own processes, which train together",
    "jobs/trainer_process.py TrainerProcess._run": "the trainer's own process, which starts",
    "jobs/trainer_process.py TrainerProcess.start": "the trainer's own process, which starts",
}
"""Functions whose lock is the resource's own, with what it is."""


def name_of(node: ast.expr) -> str:
    """The last name of a lock's expression: `self._locks[model.id]` is "_locks"."""
    while isinstance(node, ast.Subscript | ast.Call | ast.IfExp):
        if isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            node = node.body
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def names_in(node: ast.AST) -> set[str]:
    attributes = {child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)}
    return attributes | {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def slow_functions(trees: Iterable[ast.Module]) -> set[str]:
    """Names of the functions that wait for a step, directly or through one another, in whatever module."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, ast.AsyncFunctionDef)]
    slow: set[str] = set()
    while True:
        more = {f.name for f in functions if any(is_slow(a, slow) for a in ast.walk(f))}
        if more <= slow:
            return slow
        slow |= more


def is_slow(node: ast.AST, methods: set[str]) -> bool:
    """Whether a node awaits a slow object's method, takes its lock, or awaits a method that does."""
    if isinstance(node, ast.AsyncWith):
        return any(names_in(item.context_expr) & {*SLOW} for item in node.items)
    if not isinstance(node, ast.Await):
        return False
    if isinstance(node.value, ast.Call) and name_of(node.value.func) == "to_thread":
        return False  # disk work that may read a property of the engine
    return bool(names_in(node.value) & {*SLOW, *methods})


def held_across(tree: ast.Module, methods: set[str], file: str) -> Iterator[str]:
    """The functions that hold a lock across a slow await."""
    for scope in ast.walk(tree):
        if not isinstance(scope, ast.ClassDef | ast.Module):
            continue
        for function in scope.body:
            if not isinstance(function, ast.AsyncFunctionDef):
                continue
            for block in ast.walk(function):
                if isinstance(block, ast.AsyncWith | ast.With) and any(
                    name_of(item.context_expr) in LOCKS for item in block.items
                ):
                    inside = (node for line in block.body for node in ast.walk(line))
                    if any(is_slow(node, methods) for node in inside):
                        owner = f"{scope.name}." if isinstance(scope, ast.ClassDef) else ""
                        yield f"{file} {owner}{function.name}"


def unlisted(tree: ast.Module) -> Iterator[str]:
    """Locks that the check does not know, and locks that are taken where it does not look."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if names_in(node.value) & {"Lock", "Condition", "Semaphore"}:
                yield from {name_of(target) for target in targets} - {*LOCKS}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_stack = node.func.attr == "enter_async_context"
            taken = node.args[0] if is_stack and node.args else node.func.value
            if (is_stack or node.func.attr == "acquire") and name_of(taken) in LOCKS:
                yield ast.unparse(node)


TREES = {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def test_no_lock_is_held_across_a_wait_for_a_step() -> None:
    slow = slow_functions(TREES.values())
    held = {name for path, tree in TREES.items() for name in held_across(tree, slow, str(path.relative_to(ROOT)))}
    assert held - OWN.keys() == set(), "move the await out of the lock, or say why it is the resource's own"
    assert OWN.keys() - held == set(), "these hold no such lock: remove them from the list"


def test_every_lock_is_known_and_taken_by_a_block() -> None:
    trees = [tree for tree in TREES.values() if "asyncio" in names_in(tree)]
    assert [lock for tree in trees for lock in unlisted(tree)] == []


def test_the_check_sees_direct_and_indirect_waits() -> None:
    source = """
class Registration:
    async def register(self):
        async with self._registry.models_lock:
            await self._first()
    async def fork(self):
        async with self._checkpoints.changed("a"), self._locks["a"]:
            await self._fleet.unload("a")
    async def fine(self):
        async with self._registry.models_lock:
            await asyncio.to_thread(self.folder.create, self._fleet.log_path)
        await self._first()
    async def _first(self):
        await self._trainer.run(1)
    async def elsewhere(self):
        async with self._registry.models_lock:
            await self._uploads.check(1)
    async def hidden(self):
        self._guard = asyncio.Lock()
        await self._registry.models_lock.acquire()
        await stack.enter_async_context(self._locks["a"])
"""
    other = """
class Uploads:
    async def check(self, upload):
        await self._owner.take()
"""
    tree = ast.parse(source)
    slow = slow_functions([tree, ast.parse(other)])
    names = ("register", "fork", "elsewhere")
    assert set(held_across(tree, slow, "f")) == {f"f Registration.{name}" for name in names}
    assert [*unlisted(tree)] == [
        "_guard",
        "self._registry.models_lock.acquire()",
        "stack.enter_async_context(self._locks['a'])",
    ]
