"""The commands of `art` that show runs in a terminal, such as status and show, and the commands that change a model."""
