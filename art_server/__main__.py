"""The program `art-server`, also `python -m art_server`: sets the place of Python's bytecode, then runs the command.

The order matters: what is imported before `keep_bytecode` is compiled at each start where the environment forbids bytecode.
"""

from art_server.process.bytecode import keep_bytecode


def main() -> None:
    """Runs the command `art-server`."""
    keep_bytecode()
    from art_server.cli import main as run  # see above

    run()


if __name__ == "__main__":
    main()
