"""Why a turn is dropped: each sentence that reports give as the reason of a dropped turn (`JobReport.dropped`).

A reason is a constant, or a function that writes values into its sentence. One reason does not stand here: if the chat
template refuses the messages, the reason is the engine's error. Reasons of trajectories and groups are in `job_report.py`.
`where` is the path of the field that is wrong, such as `messages_and_choices[2].content`.
"""

from art_protocol.demonstrations import SHAREGPT

# --- the choice and its record (`resolve.py`) ---

CHANGED_IDS = "the choice's token ids are not those that were sampled: keep the choice as the server sent it"
NO_RECORD = (
    "the choice's record is not in the ledger, and the choice carries no tokens: request `logprobs` so that choices carry "
    "them, train on the server that sampled, or start it with a larger --ledger-max-gb or --ledger-max-age-days"
)
NO_TOKENS = (
    "the choice carries no token ids and is not in the ledger: put the choice object of the server's answer into the "
    "trajectory unchanged, or set allow_training_without_logprobs"
)
MISSING = "the choice was sent by reference, and its record is not in the ledger"
AMBIGUOUS = "samples with different prompts or tokens match the choice: keep the choice unchanged, with `art.id`"
TWICE = "the trajectory contains the same choice twice"


def other_model(model_id: str | None) -> str:
    """`model_id` is the model that sampled the choice; None: the base model."""
    name = "the base model" if model_id is None else f"'{model_id}'"
    return f"the choice was sampled by {name}, another model"


def other_part(kind: str) -> str:
    return f"the conversation contains a part of type '{kind}': only text can be trained"


# --- the tokens and their values (`resolve.py`, `turns.py`) ---

EMPTY = "the prompt or the sampled text is empty"
OUTSIDE_VOCABULARY = "a token id is outside the model's vocabulary"
BAD_LOGPROB = "a log-probability is not a finite number of at most 0"


def too_long(max_seq_length: int) -> str:
    return (
        f"the turn is longer than the model's context of {max_seq_length} tokens "
        "(start the server with a larger --max-seq-length)"
    )


def other_number_of_advantages(num_advantages: int, num_tokens: int) -> str:
    return f"{num_advantages} advantages were given for {num_tokens} sampled tokens"


def other_number_of_targets(num_targets: int, num_tokens: int) -> str:
    return f"a teacher's log-probabilities of {num_targets} tokens were given for {num_tokens} sampled tokens"


TARGETS_OF_OTHERS = (
    "a teacher's log-probabilities are at temperature 1 over the whole vocabulary, and the turn was sampled otherwise: sample "
    'at temperature 1 without top_p and the like, or train with sampling="raw"'
)


# --- the chat template (`template_turns.py`) ---

NO_CALLS_WRITTEN = "the chat template writes no tool calls"
NO_PROMPT_WRITTEN = (
    "the chat template renders no prompt for an answer that comes first: put a message of the user before it"
)
NOT_BEHIND_PROMPT = (
    "the chat template does not write this answer behind the prompt that the model gets: if the prompt opens "
    "thinking, give the message its `reasoning_content`"
)
NO_END_WRITTEN = "the chat template writes no end of this turn"


# --- the form of messages (`written_messages.py`) ---


def sharegpt(where: str) -> str:
    return f"{where} is of the form ShareGPT: {SHAREGPT}"


def no_role(where: str) -> str:
    return f"{where}.role is missing: it is 'system', 'user', 'assistant' or 'tool'"


def no_content(where: str) -> str:
    return f"{where} is no text, no list of parts and not null"


def no_part(where: str) -> str:
    return f"{where} is no part: write {{'type': 'text', 'text': TEXT}}"


def no_text(where: str) -> str:
    return f"{where}.text is no text"


def no_answer(where: str) -> str:
    return f"{where} has neither `content` nor `tool_calls`: leave the message out"


# --- the form of tool calls (`written_messages.py`) and of tools (`written_tools.py`) ---


def no_calls(where: str) -> str:
    return f"{where}.tool_calls is no list of calls"


def no_call(where: str) -> str:
    return f"{where} is no object"


def no_function_call(where: str, kind: object) -> str:
    return f"{where} is of the type {kind!r}: templates render calls of functions only"


def unnamed_call(where: str) -> str:
    return (
        f'{where} has no function with a name: write {{"id": ..., "type": "function", "function": {{"name": ..., '
        '"arguments": ...}}'
    )


def bad_arguments(where: str) -> str:
    return f"{where}.function.arguments is neither a JSON object nor its text"


def no_arguments_text(where: str) -> str:
    return f"{where}.function.arguments is not the text of a JSON object"


def no_function(where: str, kind: object) -> str:
    return f"{where} is of the type {kind!r}: templates render functions only"


def unnamed_function(where: str) -> str:
    return (
        f"{where} has no function with a name: write "
        '{"type": "function", "function": {"name": ..., "parameters": ...}}'
    )
