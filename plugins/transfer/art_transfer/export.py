"""Writes a checkpoint for other programs, as a PEFT folder or a merged model; uploads it to the Hugging Face hub."""

import json
import shutil
import sys
from pathlib import Path

from art_server.errors import InvalidInput
from art_server.store import base_models, files
from art_server.store.archive import Description
from art_server.store.base_models import (
    OTHER_CONFIG,
    SMALL_FILES,
    SMOLLM2_ID,
    find_base_model,
    find_folder,
    weight_bytes,
)
from art_server.store.model_folder import ADAPTER_FILE, CONFIG_FILE

TEMPLATE_FILE = "chat_template.jinja"
"""The file of a model's chat template, which transformers and vLLM read before `tokenizer_config.json`."""


def write_adapter(content: Path, description: Description, folder: Path) -> None:
    """Writes a PEFT folder whose configuration names the base model by its public name. The chat template is in the folder if
    it is not the base model's own."""
    files.copy_file(content / ADAPTER_FILE, folder / ADAPTER_FILE)
    write_template(description, folder)
    config = json.loads((content / CONFIG_FILE).read_bytes())
    config["base_model_name_or_path"] = public_name(description.base_model)
    files.write_json(folder / CONFIG_FILE, config)


def public_name(base_model: str) -> str:
    """A base model's name for other programs: the id of "smollm2" on the hub, the absolute path of a folder, else the name
    itself."""
    if base_model == "smollm2":
        return SMOLLM2_ID
    folder = find_folder(base_model)
    return base_model if folder is None else str(folder.absolute())


def write_merged(content: Path, description: Description, folder: Path) -> None:
    """Writes the base model with the adapter merged into its weights, in the base model's dtype, and copies the
    other files of the base model's folder: tokenizer, chat template, generation settings. The chat template is that of the
    server that made the step. Tells on stderr what is done.

    Raises:
        InvalidInput: the base model's weights are quantised.
    """
    # Imported here, because these packages take seconds to load.
    import torch
    from peft import PeftModel

    from art_server.trainer.base import load_base, read_config

    base = find_base_model(description.base_model, base_models.CACHE_DIR)
    config = read_config(str(base.path))
    if getattr(config, "quantization_config", None) is not None:
        raise InvalidInput(
            f"base model '{base.name}' is quantised, and merging into it rounds the adapter away: export without "
            "--merge",
            code="not_mergeable",
        )
    dtype = config.get_text_config().dtype or torch.float32
    size = f"{weight_bytes(base.path) / 1e9:.2g} GB"
    tell(f"loading {base.name}, {size}")
    model = PeftModel.from_pretrained(load_base(str(base.path), dtype, torch.device("cpu")), content)
    tell("merging the adapter into its layers")
    # `safe_merge`: PEFT checks the merged weights for NaN.
    merged = model.merge_and_unload(progressbar=sys.stderr.isatty(), safe_merge=True)
    # `load_base` has adapted its own configuration to what is computed here.
    merged.config = next(
        own for own in (config, config.get_text_config(), merged.config) if type(own) is type(merged.config)
    )
    tell(f"writing the merged model, {size}")
    merged.save_pretrained(folder)
    # Transformers has written its own defaults.
    (folder / "generation_config.json").unlink(missing_ok=True)
    write_template(description, folder)
    for pattern in SMALL_FILES:
        for file in base.path.glob(pattern):
            # These describe files of weights that the new folder does not have.
            is_of_weights = file.name.endswith(".index.json") or file.name == OTHER_CONFIG
            if not is_of_weights and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)


def write_template(description: Description, folder: Path) -> None:
    """Writes the chat template that the step's server used, if it is not the base model's own."""
    if description.chat_template is not None:
        files.write_file(folder / TEMPLATE_FILE, description.chat_template.encode())


def tell(what: str) -> None:
    """Tells on stderr what the command does."""
    print(f"art: {what}", file=sys.stderr, flush=True)


def push_folder(folder: Path, repository: str) -> str:
    """Uploads a folder to a repository on the Hugging Face hub and returns its URL. A new repository is private.

    Raises:
        InvalidInput: the upload failed.
    """
    # Imported here, because the hub's client is heavy and only this function needs it.
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        hub = HfApi()
        hub.create_repo(repository, private=True, exist_ok=True)
        return str(hub.upload_folder(repo_id=repository, folder_path=folder))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidInput(
            f"{folder} was written, and not pushed to '{repository}': {reason}. Log in with `hf auth login` "
            f"or HF_TOKEN, and push the folder with `hf upload {repository} {folder}`",
            code="push_failed",
        ) from error
