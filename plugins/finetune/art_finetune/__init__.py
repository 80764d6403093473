"""The commands of the finetuning harness. They are no part of the package `art`, so that other commands do not load the client."""
