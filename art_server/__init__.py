"""art-server: serves a base model with trainable LoRA policies, and trains them."""

from art_server.shared.foreign_builds import tolerate_foreign_builds

__version__ = "0.1.0"

tolerate_foreign_builds()
