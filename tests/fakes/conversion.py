"""A conversion that takes as long as a test lets it: `python -m tests.fakes.conversion FOLDER`, beside whose folder a file `ends`
or `fails` ends it."""

import shutil
import sys
import time
from pathlib import Path

from art_server.process.children import be_child, claim_stdout
from art_server.store.base_models import TINY_DIR


def main() -> None:
    be_child()
    lines = claim_stdout()
    lines.write(b"part 2 of 4, reads the weights\n")
    lines.flush()
    folder = Path(sys.argv[1])
    while not folder.with_name("ends").exists():
        if folder.with_name("fails").exists():
            sys.exit("OSError: No space left on device")
        time.sleep(0.02)
    shutil.copytree(TINY_DIR, folder)


if __name__ == "__main__":
    main()
