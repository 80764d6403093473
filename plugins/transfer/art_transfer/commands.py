"""The parsers of `art export`, `art import` and `art copy`, which `transfer.py` implements."""

import argparse
from pathlib import Path
from typing import Any

FROM_WHERE = "without --url: the folder of a server (%(default)s)"


def add_commands(commands: Any) -> None:  # Any: argparse's class for it is private
    """Adds the three parsers."""
    export = commands.add_parser("export", help="write an adapter as a PEFT folder, or the merged model")
    export.add_argument("model", metavar="MODEL[@k]", help="[PROJECT/]NAME; @k, @best or @latest selects a step")
    export.add_argument("dir", type=Path, metavar="DIR", help="a folder that does not exist, or is empty")
    export.add_argument(
        "--merge",
        action="store_true",
        help="write the base model with the adapter merged into its weights, and the tokenizer",
    )
    export.add_argument(
        "--push",
        metavar="REPO",
        help="also upload the folder to this Hugging Face repository; a new repository is private; the token is "
        "that of `hf auth login` or HF_TOKEN",
    )
    importing = commands.add_parser("import", help="create a model from a PEFT folder")
    importing.add_argument(
        "dir",
        type=Path,
        metavar="DIR",
        help="a folder with adapter_config.json and adapter_model.safetensors",
    )
    importing.add_argument("--model", required=True, metavar="PROJECT/NAME", help="the new model")
    importing.add_argument(
        "--base-model",
        help="base model of the adapter (default: the one that its configuration names)",
    )
    copying = commands.add_parser("copy", help="copy a checkpoint to an address such as s3://bucket/folder, or back")
    copying.add_argument(
        "source",
        metavar="SOURCE",
        help="MODEL[@k], or an address that fsspec opens, of a checkpoint or of a folder with checkpoints (the newest)",
    )
    copying.add_argument("target", metavar="TARGET", help="an address, or PROJECT/NAME")
    copying.add_argument("--not-after", type=int, metavar="STEP", help="the newest up to this step")
    for parser in (export, importing, copying):
        parser.add_argument("--path", type=Path, default=Path(".art"), help=FROM_WHERE)
        parser.add_argument("--url", help="a running server; its key is read from ART_API_KEY")
        parser.set_defaults(run=run, extra=None)


def run(flags: argparse.Namespace) -> None:
    """Runs a parsed command.

    Raises:
        ServerError: the command failed; the message has the reason and the remedy.
        ModuleNotFoundError: the server's packages are not installed.
    """
    if (
        flags.url is not None
        and flags.command != "copy"
        and not (flags.command == "export" and (flags.merge or flags.push))
    ):
        flags.extra = "terminal"  # the server of the URL does the rest
    # Imported here, because `art --help` needs none of the packages that `transfer` imports.
    from art_transfer import transfer

    commands = {
        "export": transfer.export_model,
        "import": transfer.import_folder,
        "copy": transfer.copy_checkpoint,
    }
    commands[flags.command](flags)
