"""What no other start of vLLM would heal is said in one sentence, and not tried again."""

import pytest

from art_server.engine.failures import find_cause

TRACEBACK = "(EngineCore pid=7) ERROR core.py Traceback (most recent call last):\n"


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (
            "ImportError: libcudart.so.13: cannot open shared object file",
            "cannot be imported here, or not for this base model: ImportError: libcudart.so.13",
        ),
        (
            "ValueError: Model architectures ['MambaXForCausalLM'] are not supported for now. Supported",
            "does not serve the architecture ['MambaXForCausalLM']",
        ),
        (
            "pydantic_core._pydantic_core.ValidationError: Value error, Unknown quantization method: bitsandbytes. Must",
            "quantised by bitsandbytes: for bitsandbytes install vllm-bnb-plugin",
        ),
        ("ValueError: BloomModel does not support LoRA yet.", "serves BloomModel without adapters only"),
        (
            "ValueError: Free memory on device cuda:0 (3.1/23.6 GiB) on startup is less than desired GPU memory "
            "utilization (0.92, 21.7 GiB). Decrease",
            "another program uses the card: Free memory on device cuda:0 (3.1/23.6 GiB)",
        ),
        (
            "ValueError: No available memory for the cache blocks. Try increasing",
            "KV cache has no room: No available memory",
        ),
        (
            "ValueError: To serve at least one request with the model's max seq len (40960), (5.62 GiB KV cache is "
            "needed, which is larger than the available KV cache memory (2.10 GiB). Based",
            "KV cache has no room: To serve at least one request with the model's max seq len (40960)",
        ),
        (
            "RuntimeError: Unsupported block size: 16",
            "cannot run this base model here (RuntimeError: Unsupported block size: 16): use another base model, or leave out --engine-arg",
        ),
        ("NotImplementedError", "cannot run this base model here"),
        ("KeyError: 'layers.0.mixer'", "cannot run this base model here (KeyError: 'layers.0.mixer')"),
    ],
)
def test_causes_that_stay(line: str, cause: str) -> None:
    read = find_cause(f"INFO starting\n{TRACEBACK}(EngineCore pid=7) ERROR core.py {line}\n")
    assert read is not None and cause in read.sentence
    assert "\n" not in read.sentence
    assert read.is_lasting != ("another program" in cause), "a killed engine's memory is freed soon"


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("", None),
        (
            TRACEBACK + "RuntimeError: CUDA error: an illegal memory access was encountered\n",
            "vLLM ended with RuntimeError: CUDA error: an illegal memory access was encountered",
        ),
        (
            "WARNING ImportError: no triton here\n" + TRACEBACK + "torch.OutOfMemoryError: 20 MiB\n",
            "vLLM ended with OutOfMemoryError: 20 MiB",
        ),
        ("WARNING ModuleNotFoundError: No module named 'x'\nINFO killed\n", None),
    ],
)
def test_causes_that_may_pass(log: str, cause: str | None) -> None:
    read = find_cause(log)
    assert (read and read.sentence) == cause
    assert read is None or not read.is_lasting


def test_the_first_error_is_the_cause_and_not_what_follows_from_it() -> None:
    read = find_cause(
        TRACEBACK
        + "(EngineCore pid=7) ERROR 11-30 09:00:00 [core.py:866]   File 'x.py', line 1, in run\n"
        + "(EngineCore pid=7) ERROR 11-30 09:00:00 [core.py:866] RuntimeError: Unsupported block size: 16\n"
        + "(APIServer pid=6) ERROR 11-30 09:00:01 [serving.py:9] vllm.v1.engine.exceptions.EngineDeadError: EngineCore "
        + "encountered an issue. See stack trace (above) for the root cause.\n"
        + "(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert read is not None and "(RuntimeError: Unsupported block size: 16)" in read.sentence and read.is_lasting
