"""ART's names, as `plugins/compat/scripts/compatibility` reads them."""

from tests.scripts import load_script

SCRIPT = load_script("plugins/compat/scripts/compatibility")


ENTRIES = SCRIPT.read_surface()


VERDICTS = {entry: SCRIPT.verdict(entry) for entry in ENTRIES}
