"""What a base model is: a program that runs in its own process, once for each base model."""
