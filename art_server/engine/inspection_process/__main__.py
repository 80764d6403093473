"""Prints the facts about a base model (`base_facts.py`) from its folder, which needs no weights.

    python -m art_server.engine.inspection_process FOLDER TEMPLATE

TEMPLATE is a file with a chat template for the model, or empty for the model's own template.
"""

import sys
from pathlib import Path

import jinja2
import transformers

from art_server.engine.inspection_process.template import template_renderer
from art_server.process.children import claim_stdout


def main() -> None:
    answers = claim_stdout()
    transformers.logging.set_verbosity_error()
    folder, name = sys.argv[1:]
    template = Path(name) if name else None
    if template is not None:
        try:
            template_renderer(template.read_text())
        except jinja2.TemplateSyntaxError as error:
            sys.exit(f"--chat-template {template}, line {error.lineno}: {error.message}")
    from art_server.engine.inspection_process.inspect_model import inspect  # its imports take seconds

    answers.write(inspect(Path(folder), template).model_dump_json().encode())
    answers.close()


if __name__ == "__main__":
    main()
