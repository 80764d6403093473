"""A program of DSPy that calls tools."""

import dspy
import litellm
import task
from dspy.utils.exceptions import AdapterParseError

import art


class Ask(dspy.Signature):
    """Call a tool."""

    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    tool_calls: dspy.ToolCalls = dspy.OutputField()


TOOLS = {function.__name__: dspy.Tool(function) for function in task.TOOLS}


async def run_agent(r: art.Rollout, question: str) -> str:
    name = r.model.get_inference_name()
    # DSPy offers tools to models of which it knows that they call them: with this engine it asks LiteLLM.
    litellm.register_model({name: {"litellm_provider": "openai", "mode": "chat", "supports_function_calling": True}})
    model = dspy.LM(
        f"openai/{name}",
        api_base=r.base_url,
        api_key=r.api_key,
        max_tokens=task.MAX_TOKENS,
        temperature=1.0,
        cache=False,
        engine="litellm",
    )
    adapter = dspy.ChatAdapter(use_native_function_calling=True, use_json_adapter_fallback=False)
    with dspy.context(lm=model, adapter=adapter):
        try:
            answer = await dspy.Predict(Ask).acall(question=question, tools=list(TOOLS.values()))
        except AdapterParseError:  # no call
            return ""
    calls = answer.tool_calls.tool_calls if answer.tool_calls is not None else []
    return " ".join(task.call_tool(call.name, call.args) for call in calls)
