"""The commands of `art` beside `art run`: checkpoints that leave a server, and come back. What they do is in `travel.py`."""

from pathlib import Path
from typing import Any

FROM_WHERE = "without a server: its folder (%(default)s)"


def add_commands(commands: Any) -> None:  # Any: argparse's class for it is private
    """Add the parsers."""
    export = commands.add_parser(
        "export", help="write an adapter, or the merged model, as a folder for PEFT and others"
    )
    export.add_argument(
        "model", metavar="MODEL[@k]", help="[PROJECT/]NAME, with @k an earlier step"
    )
    export.add_argument(
        "dir", type=Path, metavar="DIR", help="a folder that does not exist, or is empty"
    )
    export.add_argument(
        "--merge",
        action="store_true",
        help="the base's weights with the adapter added, and the tokenizer",
    )
    export.add_argument(
        "--push",
        metavar="REPO",
        help="upload the folder to this Hugging Face repository too, which is made private if it does not exist; the token "
        "is that of `hf auth login` or HF_TOKEN",
    )
    importing = commands.add_parser("import", help="make a model from a folder that PEFT wrote")
    importing.add_argument(
        "dir", type=Path, metavar="DIR", help="adapter_config.json and adapter_model.safetensors"
    )
    importing.add_argument("--model", required=True, metavar="PROJECT/NAME", help="the new model")
    importing.add_argument(
        "--base-model", help="what the adapter is for (what its configuration names)"
    )
    copying = commands.add_parser(
        "copy", help="copy a checkpoint to an address such as s3://bucket/folder, or back"
    )
    copying.add_argument(
        "source", metavar="SOURCE", help="MODEL[@k], or an address that fsspec knows"
    )
    copying.add_argument("target", metavar="TARGET", help="an address, or PROJECT/NAME")
    for parser in (export, importing, copying):
        parser.add_argument("--path", type=Path, default=Path(".art"), help=FROM_WHERE)
        parser.add_argument("--url", help="a server that runs; its key is read from ART_API_KEY")
