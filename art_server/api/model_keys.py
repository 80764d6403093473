"""Keys for inference on one model, which the ART wire issues.

A key contains its model and the owner that it was issued to, with a MAC of both, so the server stores no key. A key is
valid as long as its owner has a valid API key. To revoke all keys, delete `PATH/.server/model_keys_secret` and restart.
"""

import hashlib
import hmac


class ModelKeys:
    """Makes and verifies the keys of one server."""

    def __init__(self, secret: bytes):
        self._secret = secret

    def make(self, model_id: str, owner: str) -> str:
        """The key for `model_id` ("PROJECT/NAME"), issued to `owner`."""
        claim = f"{model_id}:{owner}"
        return f"{claim}:{hmac.new(self._secret, claim.encode(), hashlib.sha256).hexdigest()}"

    def read(self, key: str) -> tuple[str, str] | None:
        """The model id and owner of a key; None if the text is not a valid key of this kind."""
        # Names of projects, models and keys contain no colon.
        model_id, _, rest = key.partition(":")
        owner, _, _ = rest.partition(":")
        is_ours = hmac.compare_digest(self.make(model_id, owner).encode(), key.encode())
        return (model_id, owner) if is_ours else None
