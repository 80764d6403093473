"""The trainer process under Unsloth (`--trainer unsloth`): it patches transformers and peft, so it is imported before them.

python -m art_server.trainer.unsloth_worker --base-model PATH --trainer unsloth
"""

import contextlib

from art_server.children import claim_stdout


def main() -> None:
    answers = claim_stdout()  # Unsloth prints while it is imported
    # Where it cannot be imported, the first task that needs it tries again, and says why.
    with contextlib.suppress(ImportError, RuntimeError, OSError):
        import unsloth  # pyright: ignore[reportMissingImports]  # noqa: F401  # extra `gpu`
    from art_server.trainer import worker

    worker.main(answers)


if __name__ == "__main__":
    main()
