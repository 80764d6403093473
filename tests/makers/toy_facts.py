"""Facts about base models that consist of a tokenizer and a chat template."""

import json
from pathlib import Path

from art_server.engine.inspection_process.template import find_rules, read_templates
from art_server.store.base_facts import Facts


def facts_of(folder: Path) -> Facts:
    """What the ledger needs to know."""
    ids = json.loads((folder / "config.json").read_text()).get("eos_token_id", ())
    return Facts(
        model_type="toy",
        stop_ids=(ids,) if isinstance(ids, int) else tuple(ids),
        rules=find_rules(read_templates(folder)),
    )
