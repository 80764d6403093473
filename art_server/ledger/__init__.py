"""Records of what the engine sampled, and how to find them."""
