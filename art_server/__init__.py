"""art-server: serves a base model with trainable LoRA policies, and trains them."""

__version__ = "0.1.0"
