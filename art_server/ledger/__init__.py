"""What the engine really sampled, and finding it again."""
