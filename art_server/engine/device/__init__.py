"""The devices: which exist, who may use them, and the memory plan."""
