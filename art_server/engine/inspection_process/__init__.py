"""What a base model is: a program that runs in a process of its own, once for each base model."""
