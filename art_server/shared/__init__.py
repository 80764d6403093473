"""Code that several of the server's processes share: their messages, and results that must agree. No torch, no vLLM."""
