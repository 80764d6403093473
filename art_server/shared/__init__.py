"""What several of the server's processes use: the messages between them, and what they must compute alike. No torch, no vLLM."""
