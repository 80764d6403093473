"""vLLM's parsers of tool calls and thinking: the families of models that have a parser, and the marks of the parsers.

A parser is added in this file only. `engine/inspection_process/parsers.py` chooses a model's parsers by `FAMILIES`, which has
vLLM's names of parsers. `engine/vllm_process/whole_answers.py` streams answers by `CALL_MARKS`, `CALL_ENDS` and `THINKING_MARKS`,
which have the names of the parsers' classes. Both run in processes of their own, so this file imports nothing that either process
needs.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """Models that write calls and thinking in the same form."""

    tool: str | None
    """vLLM's tool parser."""
    reasoning: str | None = None
    """vLLM's reasoning parser, for templates that contain `thinks`."""
    marks: tuple[str, ...] = ()
    """Texts that the template contains, all of them."""
    types: tuple[str, ...] = ()
    """Values of `model_type`; empty: any."""
    thinks: str = "<think>"
    always: bool = False
    """Whether such a model opens its thinking by itself, although no argument of the template says so."""

    def holds(self, template: str, model_type: str) -> bool:
        """Whether a model is of this family."""
        is_type = not self.types or model_type in self.types
        return is_type and all(mark in template for mark in self.marks)


FAMILIES = (
    # DeepSeek V3 and R1 write arguments into a JSON fence, V3.1 does not.
    Family("deepseek_v3", "deepseek_r1", ("<｜tool▁calls▁begin｜>", "```json")),
    Family("deepseek_v31", "deepseek_v3", ("<｜tool▁calls▁begin｜>",)),
    Family("functiongemma", marks=("<start_function_call>",)),
    Family("gemma4", "gemma4", ("<|tool_call>",), thinks="<|channel>"),
    Family("mistral", "mistral", ("[TOOL_CALLS]", "[ARGS]"), thinks="[THINK]"),
    # Models before [ARGS] write a list of JSON, which vLLM reads with Mistral's own tokenizers only.
    Family(None, marks=("[TOOL_CALLS]",)),
    Family("poolside_v1", "poolside_v1", ("<tool_call>",), ("laguna",)),
    Family("hy_v3", "hy_v3", ("<tool_sep",)),
    Family("glm47", "glm47", ("<arg_key>",)),
    Family("olmo3", "olmo3", ("<function_calls>",)),
    Family("granite", "granite", ("<|tool_call|>",), thinks="thought process"),
    Family("lfm2", "qwen3", ("<|tool_call_start|>",)),
    Family("lfm2", marks=("<|tool_list_start|>",)),
    Family("minimax_m2", "minimax_m2", ("<minimax:tool_call>",)),
    Family("seed_oss", "seed_oss", ("<seed:tool_call>",), thinks="<seed:think>", always=True),
    Family("kimi_k2", "kimi_k2", ("<|tool_calls_section_begin|>",), always=True),
    Family("apertus", marks=("<|tools_prefix|>",)),
    # vLLM reads calls of Cohere's Command with a package of Cohere's only.
    Family(None, marks=("<|START_ACTION|>",)),
    Family("phi4_mini_json", marks=("<|tool|>",)),
    Family("hunyuan_a13b", "hunyuan_a13b", ("<tool_calls>",), ("hunyuan_v1_dense", "hunyuan_v1_moe")),
    Family("ernie45", "ernie45", ("<tool_call>",), ("ernie4_5", "ernie4_5_moe")),
    Family("muse_glimmer", "muse_glimmer", types=("muse_glimmer",), thinks=""),
    Family("openai", "openai_gptoss", types=("gpt_oss",), thinks=""),
    Family("qwen3_coder", "nemotron_v3", ("<function=",), ("nemotron_h",)),
    Family("qwen3_xml", "qwen3", ("<function=",)),
    Family(None, "nemotron_v3", types=("nemotron_h",)),  # vLLM cannot read its <TOOLCALL>
    Family("hermes", "qwen3", ("<tool_call>",)),
    Family("llama3_json", "qwen3", ("<|python_tag|>",)),
    Family("llama3_json", "qwen3", ('"parameters": dictionary',)),
    Family("llama4_pythonic", types=("llama4",)),
    Family(None, "qwen3"),
)
"""The first family that holds decides."""

CALL_MARKS = {
    "DeepSeekV3ToolParser": ("<｜tool▁calls▁begin｜>",),
    "DeepSeekV31ToolParser": ("<｜tool▁calls▁begin｜>",),
    "Ernie45ToolParser": ("<tool_call>",),
    "FunctionGemmaToolParser": ("<start_function_call>",),
    "Hermes2ProToolParser": ("<tool_call>",),
    "Llama3JsonToolParser": ("{", "<|python_tag|>"),
    "Llama4PythonicToolParser": ("[", "<|python_start|>"),
    "MuseGlimmerToolParser": ("<atem:",),
    "Phi4MiniJsonToolParser": ("functools",),
    "PoolsideV1ToolParser": ("<tool_call>",),
}
"""The texts that begin a call, by the class of the tool parser. Parsers with a grammar of vLLM name their marks themselves."""
CALL_ENDS = {
    "ApertusToolParser": ("<|tools_prefix|>", "<|tools_suffix|>"),
    "FunctionGemmaToolParser": ("<start_function_call>", "<end_function_call>"),
    "HYV3ToolParser": ("<tool_calls", "</tool_calls"),
}
"""The marks around calls, by the class of the tool parser: only parsers without a grammar that complete a call which was cut."""
UNKNOWN_CALL_MARKS = ("<", "[", "{", "functools")
"""The marks of a tool parser that is not listed. A text with one of them waits for the answer's end."""
THINKING_MARKS = {
    "Ernie45ReasoningParser": ("<response>", "</response>"),
    "GraniteReasoningParser": ("Here is my thought process:", "Here's my thought process:"),
    "HunyuanA13BReasoningParser": ("<think>", "<answer>", "</answer>"),
    "MuseGlimmerReasoningParser": ("to=", "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
}
"""Texts that a reasoning parser takes out of an answer besides the marks that it names, by the class of the parser."""
