"""The trainer process with Unsloth (`--trainer unsloth`), which is imported first: it patches transformers and peft.

python -m art_server.trainer.unsloth_worker '{"base_model": "PATH", "trainer": "unsloth"}'
"""

import contextlib

from art_server.process.children import claim_stdout


def main() -> None:
    answers = claim_stdout()  # Unsloth prints while it is imported
    # If the import fails, the first task that needs Unsloth tries again and reports the reason.
    with contextlib.suppress(ImportError, RuntimeError, OSError):
        import unsloth  # pyright: ignore[reportMissingImports]  # noqa: F401  # extra `gpu`
    from art_server.trainer import worker

    worker.main(answers)


if __name__ == "__main__":
    main()
