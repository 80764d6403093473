"""art-server: serves a base model with trainable LoRA policies, and trains them."""

from art_server.shared.image_operators import declare_image_operators

__version__ = "0.1.0"

declare_image_operators()
