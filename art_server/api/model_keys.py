"""Keys for inference on one model, as the ART wire hands them out.

A key names its model and the owner of the key that it was made for, and proves both with a MAC: none is stored. It ends
with the owner's last key, and all of them end with the secret (`PATH/.server/model_keys_secret`; delete it and start again).
"""

import hashlib
import hmac
import os
from pathlib import Path

SECRET_BYTES = 32


class ModelKeys:
    """Makes and reads the keys of one server."""

    def __init__(self, secret: bytes):
        self._secret = secret

    def make(self, model_id: str, owner: str) -> str:
        """The key for `model_id` ("PROJECT/NAME") of the caller whom `owner` names."""
        claim = f"{model_id}:{owner}"
        return f"{claim}:{hmac.new(self._secret, claim.encode(), hashlib.sha256).hexdigest()}"

    def read(self, key: str) -> tuple[str, str] | None:
        """Model and owner that a key was made for, None for what is no such key."""
        model_id, _, rest = key.partition(":")
        owner, _, _ = rest.partition(":")
        is_ours = hmac.compare_digest(self.make(model_id, owner).encode(), key.encode())
        return (model_id, owner) if is_ours else None


def read_secret(file: Path) -> bytes:
    """The server's secret, made at its first start, readable by its user only."""
    if not file.exists():
        temporary = file.with_suffix(".tmp")
        with open(temporary, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as made:
            made.write(os.urandom(SECRET_BYTES))
            made.flush()
            os.fsync(made.fileno())
        os.replace(temporary, file)
    return file.read_bytes()
