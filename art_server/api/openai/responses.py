"""Stored responses: a request of the Responses API names an earlier answer in place of its conversation.

The ledger keeps the items of each response, unless the request has `store: false`, as long as the response's record. vLLM
gets the whole conversation, so any replica can answer, also after a restart. As in OpenAI's API, instructions and tools are
not taken over. Background mode and OpenAI's conversations are refused, because nothing here answers for them later.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from art_server.errors import BadRequest, NotFound
from art_server.inference_proxy import InferenceRequest
from art_server.ledger import conversation
from art_server.ledger.ledger import Ledger, OpenRequest

REFUSED: Mapping[str, str] = {
    "background": "an answer is sent to the request that waits for it: leave out `background`",
    "conversation": "conversations are not kept under a name: send previous_response_id, or the whole conversation as `input`",
}
HOW_LONG = "--ledger-max-age-days and --ledger-max-gb say how long responses are kept"


def check_response_fields(api: str, body: dict[str, Any]) -> None:
    """Checks the fields of the Responses API that name what a server keeps. Removes a previous_response_id that is null.

    Raises:
        BadRequest: the field would have no effect, or has another type.
    """
    if api != "responses":
        return
    for field, remedy in REFUSED.items():
        if body.get(field):
            raise BadRequest(f"{field}: {remedy}", code="unknown_option", param=field)
    if not isinstance(earlier := body.get("previous_response_id", ""), str | None):
        text = f"previous_response_id: it must be the id of a response, not {type(earlier).__name__}"
        raise BadRequest(text, code="invalid_body", param="previous_response_id")
    if earlier is None:
        del body["previous_response_id"]


def is_reference(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == "item_reference"


def names_stored(inference: InferenceRequest) -> bool:
    """Whether a request names a response, or an item of one, in place of its content."""
    body = inference.body
    return inference.api == "responses" and (
        "previous_response_id" in body or any(map(is_reference, conversation.as_list(body.get("input"))))
    )


def add_stored(ledger: Ledger, inference: InferenceRequest) -> None:
    """Replaces the names in a resolved request by the stored items, as if the agent had sent the items. Reads the ledger
    (blocking).

    Raises:
        NotFound: nothing is stored under the name for this model.
    """
    body = dict(inference.body)
    earlier: str | None = body.pop("previous_response_id", None)
    items = [] if earlier is None else ledger.find_response(*inference.scope, earlier)
    if items is None:
        raise NotFound(
            f"previous_response_id: {inference.requested_model} has no stored response {earlier!r}: it was sampled with "
            f"`store: false`, by another model or for another project, or is deleted. {HOW_LONG}. Send the whole "
            "conversation as `input`",
            code="unknown_response",
            param="previous_response_id",
        )
    for index, item in enumerate(input_items(body)):
        if is_reference(item):
            stored = ledger.find_item(*inference.scope, str(item.get("id")))
            if stored is None:
                raise NotFound(
                    f"input[{index}]: {inference.requested_model} has no stored item {item.get('id')!r}: its response was "
                    f"sampled with `store: false`, by another model or for another project, or is deleted. {HOW_LONG}. Send "
                    "the item itself",
                    code="unknown_item",
                    param=f"input[{index}]",
                )
            item = stored
        items.append(item)
    body["input"] = items
    inference.body, inference.continued_response = body, earlier


def keep_response(inference: InferenceRequest, opened: OpenRequest, response: Mapping[str, Any]) -> None:
    """Stores the items of a response, unless the request has `store: false` or the response has no record."""
    if inference.body.get("store") is False or not opened.records:
        return
    output = [without_nulls(item) for item in response["output"]]
    item_ids = [item["id"] for item in output if "id" in item]
    opened.ledger.keep_response(opened.request.request_id, [*input_items(inference.body), *output], item_ids)


def keep_whole(inference: InferenceRequest, opened: OpenRequest, content: bytes) -> None:
    """Stores a response that is one JSON body."""
    keep_response(inference, opened, msgspec.json.decode(content))


def keep_streamed(inference: InferenceRequest, opened: OpenRequest, event: bytes) -> None:
    """Stores the response in a stream's last event."""
    keep_response(inference, opened, msgspec.json.decode(event.partition(b"data: ")[2])["response"])


def input_items(body: Mapping[str, Any]) -> list[Any]:
    """The input of a request as items."""
    content = body.get("input")
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    return list(conversation.as_list(content))


def without_nulls(value: Any) -> Any:
    """An item of an answer as a request sends the item: vLLM writes fields without a value as null, and refuses some nulls in
    requests."""
    if isinstance(value, dict):
        return {name: without_nulls(field) for name, field in value.items() if field is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value
