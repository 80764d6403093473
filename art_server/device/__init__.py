"""Who may use the device, and what fits it."""
