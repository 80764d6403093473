"""Files that are whole or absent, whenever the process dies."""

import os
import tempfile
from pathlib import Path


def write_whole(file: Path, content: bytes) -> None:
    """Writes a file, readable by its user only, and replaces an earlier file. Makes the folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".", delete=False) as draft:
        try:
            draft.write(content)
            draft.flush()
            os.fsync(draft.fileno())
            os.replace(draft.name, file)
        finally:
            Path(draft.name).unlink(missing_ok=True)  # exists only after an error
