"""Environment variables by which the server controls our changes to vLLM's processes."""

SWITCH = "ART_ENGINE_DEVICE"
"""The device. Set only for our engines, so that other vLLM processes of the same installation remain unchanged."""
EXPERTS_SWITCH = "ART_ENGINE_EXPERTS"
"""Set for a base model that is a mixture of experts."""
ONE_THREAD_SWITCH = "ART_ENGINE_ONE_THREAD"
"""Set where vLLM's CPU worker computes with one thread."""
