"""Answers of LiteLLM in trajectories."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice


def convert_litellm_choice_to_openai(litellm_choice: Any) -> "Choice":
    """LiteLLM's choice as OpenAI's `Choice`, which a trajectory takes. All fields of the server stay, such as token ids.

    Raises:
        ValueError: the choice's message is not an assistant's.
    """
    from openai.types.chat.chat_completion import Choice  # this import takes most of a second

    fields: dict[str, Any] = {"logprobs": None} | litellm_choice.model_dump()
    fields |= fields.pop("provider_specific_fields", None) or {}  # LiteLLM keeps the server's fields there
    if (role := fields["message"].get("role")) != "assistant":
        raise ValueError(f"a choice is an assistant's message, not one of role {role!r}")
    fields["message"] = {
        name: value for name, value in fields["message"].items() if value is not None or name == "content"
    }
    return Choice.model_validate(fields)
