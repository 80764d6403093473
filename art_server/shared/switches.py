"""Variables by which the server tells vLLM's processes what to change in them."""

SWITCH = "ART_ENGINE_DEVICE"
"""Set in the environment of our engines, so that other vLLMs of the same installation stay as they are."""
EXPERTS_SWITCH = "ART_ENGINE_EXPERTS"
"""Set where the base is a mixture of experts."""
ONE_THREAD_SWITCH = "ART_ENGINE_ONE_THREAD"
"""Set where a CPU's worker computes with one thread."""
