"""The parts of `scripts/make_tiny_model.py`: synthetic chats, tokenizer, training and measurement."""
