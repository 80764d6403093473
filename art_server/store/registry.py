"""The registered models, the step that each one serves, and what a name in a request means.

`Registry.resolve` goes from a name to the adapter of a step: "PROJECT/NAME" is the step that serves, which is the newest (or,
with an undecided release of learning, the newest before it), "PROJECT/NAME@12" step 12, "PROJECT/NAME@best" the best step, and the base model's name the base model without an adapter.

A new step is served from one assignment on, after its checkpoint is complete and the engine has loaded it, or will
load it at its next start (`Attempt._serve`).

A model's row is what the model is. Its folder follows a rename and a rollback after the commit; while the folder cannot (a full
disk), requests for inference see the model as the row says, and jobs and changes of the model are refused.
"""

import asyncio
import contextlib
import difflib
import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from art_protocol.wire import NAME_PATTERN, NAME_RULE, LoRAConfig
from art_server.errors import Conflict, InvalidInput, NotFound, ServerError
from art_server.store import files
from art_server.store.history import BEST_METRICS, HistoryTable, MetricHistory
from art_server.store.model_folder import ModelFolder, ModelRecord, list_model_folders
from art_server.store.model_table import ModelRow, ModelTable
from art_server.store.server_database import open_server_database

logger = logging.getLogger(__name__)

_NAME = re.compile(NAME_PATTERN)
UNKNOWN_MODEL = "unknown_model"
"""The code of the error about a name that no model has."""
MAX_NAMED = 5
"""Number of models that an error lists."""
NOTHING_WHOLE = "MODEL %s HAS NO WHOLE CHECKPOINT: it is not served"
_ARTS_STEP = re.compile(r":step([0-9]+)$")


def split_step(name: str) -> tuple[str, str]:
    """The name of a model and its step, empty without one: "p/a@3" and "p/a:step3" (as programs of ART write it) -> "p/a", "3"."""
    path, _, step = _ARTS_STEP.sub(r"@\1", name).partition("@")
    return path, step


@dataclass(frozen=True, slots=True)
class Split:
    """A canary: a newer step answers the requests of a share of the users."""

    step: int
    share: float
    release: int
    """The release's number. Each release splits the users anew."""

    def takes(self, key: bytes) -> bool:
        """Whether the newer step answers the requests with this key."""
        digest = hashlib.blake2b(key, digest_size=8, salt=self.release.to_bytes(16, "big")).digest()
        return int.from_bytes(digest, "big") < self.share * 2**64


@dataclass(slots=True)
class RegisteredModel:
    """A registered model. `step` is the step that serves: requests without `@k` get this step."""

    number: int
    """Stays when the model is renamed. Jobs, metrics and the ledger's records refer to the number."""
    folder: ModelFolder
    record: ModelRecord
    step: int
    history: MetricHistory
    holds_steps: bool = False
    """New steps do not serve before their release is decided."""
    split: Split | None = None
    keeps_messages: bool = False
    """The model learns from the texts of scores, so the ledger keeps the messages of its requests."""
    deleting: set[int] = field(default_factory=set)
    """Steps that are being deleted. No request resolves to them, so none loads them again."""
    is_leaving: bool = False
    """The model is being deleted. No request for inference resolves to it."""
    rolled_back_to: int | None = None
    """The step of a rollback that the folder has yet to follow; None: the folder has no later steps than the model."""
    is_verified: bool = True
    """False from the server's start until the first use (`Registry.verify`): the files of the newest step may be broken."""
    verify_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def id(self) -> str:
        return f"{self.record.project}/{self.record.name}"

    def adapter_name(self, step: int) -> str:
        """The engine's name for the adapter of a step."""
        return f"{self.id}@{step}"

    def has(self, step: int) -> bool:
        """Whether a step of the folder is a step of the model: it is not being deleted, and no rollback has removed it."""
        return step not in self.deleting and (self.rolled_back_to is None or step <= self.rolled_back_to)

    def steps(self) -> list[int]:
        """The steps in the folder that no rollback has removed, oldest first."""
        last = self.rolled_back_to
        return [step for step in self.folder.steps() if last is None or step <= last]

    def best_step(self) -> int:
        """The best kept step that is not being deleted.

        Raises:
            NotFound: the history has no metric to judge by, or none for a kept step.
        """
        for step in self.history.ranking()[1]:
            if self.has(step) and self.folder.checkpoint_dir(step).exists():
                return step
        raise NotFound(
            f"model '{self.id}' has no best step: no kept step has {', '.join(BEST_METRICS[:-1])} or {BEST_METRICS[-1]} in the "
            "history. Log a validation (art.evaluate, or train_sft with validation=...), or name a step, for example "
            f"{self.adapter_name(self.step)}",
            code="unknown_step",
            param="model",
        )


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """What a request's `model` field names: a model at a step, or the base model (both fields are None)."""

    model: RegisteredModel | None
    step: int | None


def known_models(text: str, known: Sequence[str]) -> str:
    """The known names, for the error about a wrong name: first the name that the wrong name resembles, then a few others."""
    meant = nearest(text.partition("@")[0], known)
    shown = sorted(known, key=lambda name: (name != meant, name))[:MAX_NAMED]
    more = f" and {len(known) - len(shown)} more" if len(known) > len(shown) else ""
    hint = f"did you mean '{meant}'? " if meant else ""
    return f"{hint}known models: {', '.join(shown) or 'none'}{more}"


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The known name that a wrong name resembles, with or without its project, or with another one."""
    by_end = {known_name.rpartition("/")[2]: known_name for known_name in known}
    by_end |= {known_name: known_name for known_name in known}
    matches = difflib.get_close_matches(name[:200], by_end, n=1)
    # "openai/NAME", as frameworks write it
    matches = matches or difflib.get_close_matches(name.rpartition("/")[2][:200], by_end, n=1)
    return by_end[matches[0]] if matches else None


def check_name(value: str, field: str) -> str:
    """Returns a name that is safe as a folder's name.

    Raises:
        InvalidInput: the value is no such name.
    """
    if not _NAME.fullmatch(value):
        shown = value if len(value) <= 80 else value[:80] + "..."
        raise InvalidInput(
            f"{field} '{shown}' ({len(value)} characters) is not a name: {NAME_RULE}",
            code="bad_name",
            param=field,
        )
    return value


def check_case(known: Sequence[ModelFolder], new: ModelFolder) -> None:
    """Checks that no project or model has the same name as the new model but for case: on some systems both would be one
    folder.

    Raises:
        Conflict: there is such a project or model; the message has its name.
    """
    projects = {folder.project for folder in known}
    names = {folder.name for folder in known if folder.project == new.project}
    for what, param, name, existing in (
        ("project", "project", new.project, projects),
        ("model", "name", new.name, names),
    ):
        same = [other for other in sorted(existing) if other.lower() == name.lower()]
        if same and name not in same:
            raise Conflict(
                f"{what} '{name}' differs from the existing {what} '{same[0]}' by case only, and on some systems both are "
                f"one folder: use '{same[0]}', or another name",
                code="name_differs_by_case",
                param=param,
            )


class Registry:
    """All models under the server's path, read once at start."""

    def __init__(self, root: Path, forget_steps: Callable[[int, int], None] = lambda model, step: None):
        """`forget_steps(MODEL, STEP)` is called in a thread before the broken steps of a model (its number) after STEP are set
        aside, because their numbers will be used again. If the server dies in between, the next server calls it again."""
        self._root = root.absolute()
        self._models: dict[tuple[str, str], RegisteredModel] = {}
        """By project and name, because each request names a model."""
        self.models_lock = asyncio.Lock()
        """Held while the files of a model are created or deleted, and across nothing else."""
        self._forget_steps = forget_steps
        self.database = open_server_database(self._root)
        self.table = ModelTable(self.database)
        self._history = HistoryTable(self.database)
        for models_dir in self._root.glob("*/models"):
            files.clear_temporary(models_dir)
            files.clear_graves(models_dir)
        for row in self.table.rows():
            with logged(f"the folder of {row.project}/{row.name} cannot follow a change of the model"):
                self._follow(row)
        with self.database.changes("the models"):
            self._find_models()

    def _follow(self, row: ModelRow) -> None:
        """Makes a model's folder follow the model's row, which a rename or a rollback has changed. After a crash a second call
        does the rest."""
        is_moving = row.folder != row.name
        if not is_moving and row.rolled_back_to is None:
            return
        for name in (row.folder, row.name):  # a killed server may have moved the folder already
            folder = ModelFolder(self._root, row.project, name)
            if folder.exists() and folder.read().created_at == row.registered_at:
                break
        else:
            return  # other models' folders have these names
        if is_moving:
            if folder.name != row.name:
                folder = folder.rename(row.name)
            self.table.note_moved(row.model)
        if row.rolled_back_to is not None:
            folder.roll_back(row.rolled_back_to)
            self.table.note_set_aside(row.model)

    def _find_models(self) -> None:
        """Finds the folders of all models. A folder gets a new number if its model is in no row: an earlier version or `art
        import` made the folder, or a person copied the folder to this path."""
        rows = self.table.rows_by_folder()
        for folder in list_model_folders(self._root):
            folder.clear_temporary()
            files.clear_graves(folder.checkpoints_dir)
            if folder.newest_step() is None:
                logger.error(NOTHING_WHOLE, folder.model_id)
                continue
            record = folder.read()
            row = rows.get((folder.project, folder.name, record.created_at))
            self._add(folder, record, row).is_verified = False

    def _add(self, folder: ModelFolder, record: ModelRecord, row: ModelRow | None) -> RegisteredModel:
        """Adds the model of a folder; without `row` as a new model. Within `Database.changes`."""
        number = self.table.add(record) if row is None else row.model
        if row is None or row.rolled_back_to is None:  # otherwise the file still has the metrics of the later steps
            self._history.import_missing(number, folder)
        name = record.name if row is None else row.name
        record = record.model_copy(update={"name": name})
        model = RegisteredModel(number, folder, record, 0, self._history.of(number, folder))
        model.rolled_back_to = None if row is None else row.rolled_back_to
        model.step = self._serving_step(model, model.steps())
        self._models[record.project, name] = model
        return model

    def _serving_step(self, model: RegisteredModel, steps: Sequence[int]) -> int:
        """The step of `steps` that serves: the newest, or the newest that no undecided release has made."""
        incumbent, newest = self.read_release(model), max(steps, default=0)
        if incumbent is None:
            return newest
        return max((step for step in steps if step <= incumbent), default=newest)

    def read_release(self, model: RegisteredModel) -> int | None:
        """Reads whether a release of the model is undecided (blocking). Returns the step that serves meanwhile; None: no release is."""
        incumbent = self.table.incumbents().get(model.number)
        model.holds_steps = incumbent is not None
        if incumbent is None:
            model.split = None
        return incumbent

    def set_later_aside(self, model: RegisteredModel, step: int) -> None:
        """Makes a model's folder follow a rollback to `step` (blocking). If the disk refuses, the next job or change of the model
        tries again."""
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(setattr, model, "rolled_back_to", step)
            model.folder.roll_back(step)
            self.table.note_set_aside(model.number)
            on_failure.pop_all()
        model.rolled_back_to = None

    async def prepare(self, model: RegisteredModel) -> None:
        """Verifies a model before a job or a change, and sets the steps aside that a rollback could not.

        Raises:
            NotFound: no step is whole.
            StorageFull, OSError: the disk refuses. Inference continues.
        """
        await self.verify(model)
        async with model.verify_lock:
            if model.rolled_back_to is not None:
                await asyncio.to_thread(self.set_later_aside, model, model.rolled_back_to)

    async def verify(self, model: RegisteredModel) -> None:
        """Compares the files of a model's newest step with their digests, at the model's first use after the start: a start
        does not wait for the disk to read all models. Broken steps are set aside, and the step before them serves. This is
        enough for inference.

        Raises:
            NotFound: no step is whole; the model is not served from here on.
        """
        if model.is_verified:
            return
        async with model.verify_lock:
            if model.is_verified:
                return
            faults = await asyncio.to_thread(model.folder.newest_faults, model.steps())
            newest = max((step for step in model.steps() if step not in faults), default=None)
            if faults and newest is not None:
                await asyncio.to_thread(self._forget_steps, model.number, newest)
            await asyncio.to_thread(model.folder.set_broken_aside, faults)
            if newest is None:
                logger.error(NOTHING_WHOLE, model.id)
                self._models.pop((model.record.project, model.record.name), None)
                raise NotFound(
                    f"model '{model.id}' has no whole checkpoint: all were set aside in {model.folder.checkpoints_dir}",
                    code=UNKNOWN_MODEL,
                    param="name",
                )
            model.step, model.is_verified = (
                self._serving_step(model, [step for step in model.steps() if step <= newest]),
                True,
            )

    def all(self, projects: frozenset[str] | None = None, only: str | None = None) -> list[RegisteredModel]:
        """The models that a caller may see: models of `projects` (None: all), with `only` just the model with this id."""
        return [
            model
            for model in list(self._models.values())  # a thread deletes models
            if (projects is None or model.record.project in projects)
            and only in (None, model.id)
            and not model.is_leaving
        ]

    def find(self, project: str, name: str) -> RegisteredModel | None:
        return self._models.get((project, name))

    def of_number(self, number: int) -> RegisteredModel | None:
        """The model with this number; None if it is deleted, or no step of it is whole."""
        models = list(self._models.values())  # a thread deletes models
        return next((model for model in models if model.number == number), None)

    async def find_whole(self, project: str, name: str) -> RegisteredModel | None:
        """As `find`, prepared; None also for a model without a whole step."""
        model = self.find(project, name)
        with contextlib.suppress(NotFound):
            if model is not None:
                await self.prepare(model)
        return self.find(project, name)

    def get(self, project: str, name: str) -> RegisteredModel:
        """Returns a registered model.

        Raises:
            NotFound: no model of this name is registered.
        """
        check_name(project, "project")
        check_name(name, "name")
        model = self.find(project, name)
        if model is None:
            raise self.unknown(project, name)
        return model

    def unknown(self, project: str, name: str) -> NotFound:
        """The refusal of a name. It names models of the same project only: the caller may not see others."""
        meant = nearest(name, [known.id for known in list(self._models.values()) if known.record.project == project])
        return NotFound(
            f"no model '{project}/{name}' is registered here; register it first (model.register(backend))"
            + (f". Did you mean '{meant}'?" if meant else ""),
            code=UNKNOWN_MODEL,
            param="name",
        )

    async def get_whole(self, project: str, name: str) -> RegisteredModel:
        """As `get`, prepared.

        Raises:
            NotFound: no model of this name is registered, or no step of it is whole.
        """
        model = self.get(project, name)
        await self.prepare(model)
        return model

    def history_of(self, folder: ModelFolder) -> MetricHistory | None:
        """The history of the model that has a folder; None if the folder's model is not registered."""
        model = self.find(folder.project, folder.name)
        return None if model is None else model.history

    def folder(self, project: str, name: str) -> ModelFolder:
        """The folder of a model that may not exist yet; both names are checked.

        Raises:
            InvalidInput: a name is not valid.
            Conflict: the folder is another model's, or differs from another model's by case only.
        """
        folder = ModelFolder(self._root, check_name(project, "project"), check_name(name, "name"))
        models = list(self._models.values())
        check_case([model.folder for model in models], folder)
        for model in models:
            if model.folder.path == folder.path and model.id != folder.model_id:
                raise Conflict(
                    f"the folder of model '{model.id}' still has the name '{name}', because the disk refused to move it: the "
                    "next start of the server moves it. Use another name until then",
                    code="model_exists",
                    param="name",
                )
        return folder

    def add(self, folder: ModelFolder, record: ModelRecord) -> RegisteredModel:
        """Registers a model whose folder holds model.json and a checkpoint (blocking). The number is new, but for a model whose
        checkpoints were all set aside, and which got a checkpoint again."""
        newest = folder.newest_step()
        assert newest is not None, "the first checkpoint must be written before"
        row = self.table.rows_by_folder().get((record.project, folder.name, record.created_at))
        if row is not None:
            self._forget_steps(row.model, newest)
        with self.database.changes("the model"):
            return self._add(folder, record, row)

    def rename(self, model: RegisteredModel, name: str) -> RegisteredModel:
        """Gives a model another name in its project. The commit of the model's row is the rename: if the server dies before it
        has moved the folder, or the disk refuses, the next server moves the folder."""
        self.table.rename(model.number, name, model.folder.name)
        with logged(f"{model.id} has the name {name} now, but its folder cannot follow before the next start"):
            model.folder.rename(name)
            self.table.note_moved(model.number)
        record = model.record.model_copy(update={"name": name})
        named = ModelFolder(self._root, record.project, name)
        folder = named if named.exists() else model.folder
        del self._models[record.project, model.record.name]
        renamed = RegisteredModel(model.number, folder, record, model.step, self._history.of(model.number, folder))
        renamed.holds_steps, renamed.split = model.holds_steps, model.split
        renamed.keeps_messages = model.keeps_messages
        self._models[record.project, name] = renamed
        return renamed

    def remove(self, model: RegisteredModel) -> None:
        """Deletes a model whose folder is gone. A row without a folder is no model, so the row may stay if the database is
        locked."""
        self._models.pop((model.record.project, model.record.name), None)
        with logged(f"the row of {model.id}, which was deleted, stays"):
            self.table.delete(model.number)

    def resolve(
        self,
        text: str,
        base_name: str | None,
        projects: frozenset[str] | None,
        only: str | None = None,
    ) -> ResolvedModel:
        """Resolves `text`, a request's `model`, for a caller who may see `projects` (None: all), or only model `only`.

        Accepts "PROJECT/NAME[@k]", "NAME[@k]" if the name is unique among the models that the caller may see, or the
        base model's name. k is a step or "best"; without k it is the newest step that serves. ":stepK" at the end is "@K", as
        programs of ART write it. In front of PROJECT/NAME and of a base model's name with a slash, one more name and slash are
        left out: some frameworks write "openai/PROJECT/NAME".

        Raises:
            NotFound: there is no such model or step.
            Conflict: models of several projects have the name.
        """
        if text == base_name and only is None:
            return ResolvedModel(None, None)
        path, step_text = split_step(text)
        provider, _, rest = path.partition("/")
        if provider and "/" in rest:
            if rest == base_name and only is None:
                return ResolvedModel(None, None)
            path = rest
        project, slash, name = path.rpartition("/")
        visible = self.all(projects, only)
        matches = [
            model for model in visible if model.record.name == name and (not slash or model.record.project == project)
        ]
        if not matches:
            is_project = any(model.record.project == text for model in visible)
            hint = f"'{text}' is a project: write {text}/NAME, or NAME alone if the agent's framework cuts names at slashes; "
            raise NotFound(
                f"no model '{text[:200]}' here; {hint if is_project else ''}"
                f"{known_models(text, [model.id for model in visible])}; base model: {base_name or 'none'}",
                code=UNKNOWN_MODEL,
                param="model",
            )
        if len(matches) > 1:
            projects_text = ", ".join(sorted(model.record.project for model in matches))
            raise Conflict(
                f"model '{name}' exists in several projects ({projects_text}): write PROJECT/{name}",
                code="ambiguous_model",
                param="model",
            )
        (model,) = matches
        return ResolvedModel(model, kept_step(model, step_text) if step_text else model.step)


@contextlib.contextmanager
def logged(what: str) -> Iterator[None]:
    """Logs an error of the disk or the database instead of raising it."""
    try:
        yield
    except (OSError, ServerError) as error:
        logger.error("%s: %s", what, error)


def kept_step(model: RegisteredModel, text: str) -> int:
    """The kept step whose number `text` is; for "best" the best step.

    Raises:
        NotFound: the model has no such step.
    """
    if text == "best":
        return model.best_step()
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise NotFound(
            f"'{text[:80]}' is not a step: write {model.adapter_name(model.step)} or {model.id}@best",
            code="unknown_step",
            param="model",
        )
    if not model.has(int(text)):
        raise model.folder.unknown_step(int(text))
    return model.folder.read_checkpoint(int(text)).step


def check_lora(known: LoRAConfig, requested: LoRAConfig | None, model_id: str) -> None:
    """Checks the LoRA shape of a model that is registered again.

    Raises:
        Conflict: the model's checkpoints have another shape.
    """
    if requested is not None and _shape(requested) != _shape(known):
        raise Conflict(
            f"model '{model_id}' has a LoRA of {known.model_dump()}; it cannot be changed to {requested.model_dump()}: "
            "register another name",
            code="lora_differs",
            param="lora",
        )


def _shape(lora: LoRAConfig) -> tuple[int, float, frozenset[str] | None]:
    """What decides an adapter's shape: the order of the layers does not."""
    modules = lora.target_modules
    return lora.rank, lora.alpha, None if modules is None else frozenset(modules)


def check_rank(lora: LoRAConfig, maximum: int) -> None:
    """Checks a LoRA's rank against the engine's maximum.

    Raises:
        InvalidInput: the rank is higher.
    """
    if lora.rank > maximum:
        raise InvalidInput(
            f"lora.rank {lora.rank} is above the engine's maximum of {maximum}: use a lower rank, or start the server "
            "with a larger --max-lora-rank",
            code="rank_too_high",
            param="lora.rank",
        )
