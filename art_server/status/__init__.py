"""What the server tells about itself: its health, what it does and waits for, and its memory."""
