"""What is trained of demonstrations: rendered by the code of vLLM's route for tokens, without an engine."""

import functools
import json
import warnings
from types import SimpleNamespace
from typing import Any, NamedTuple

from art_protocol.wire import JobReport, TrainConfig, TrajectoryGroupBody
from art_server.engine.inspection_process.template import TEMPLATE_ERRORS, template_renderer
from art_server.engine.vllm_process import plain_text
from art_server.engine.vllm_process.plain_text import ControlTokens, MarkedRendering
from art_server.errors import InvalidInput
from art_server.jobs.token_sources import Limits, TokenSources
from art_server.ledger.decoder import Decoder
from tests.makers.resolving import resolve
from tests.makers.toy_facts import facts_of
from tests.quick.ledger.chat_families import Family

with warnings.catch_warnings(action="ignore"):  # vLLM's and torch's own deprecations
    from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest
    from vllm.renderers.chat_utils import parse_chat_messages

MODEL: Any = SimpleNamespace(multimodal_config=None, enable_prompt_embeds=False)
"""What the route reads of a model's configuration."""


class Trained(NamedTuple):
    """What a train call trains."""

    texts: list[str]
    """By turn."""
    num_tokens: int
    report: JobReport


@functools.cache
def sources(family: Family) -> TokenSources:
    """A ledger without records, and an engine with the family's template."""
    facts = facts_of(family.folder)
    decoder = Decoder(family.folder, facts.stop_ids, facts.rules.behind_answer)
    control = ControlTokens(family.tokenizer, family.text)
    apply = functools.partial(template_renderer(family.text), eos_token=family.end)

    def render(messages: list[dict[str, Any]], tools: Any, has_header: bool) -> list[int]:
        body = {"messages": messages, "add_generation_prompt": has_header, "tools": tools}
        try:
            request = TokenizeChatRequest.model_validate_json(json.dumps(body))
            conversation, *_ = parse_chat_messages(request.messages, MODEL, "string")
            options = {"tools": [tool.model_dump() for tool in request.tools or ()] or None}
            text = plain_text.render(
                control,
                lambda conversation, tools: apply(messages=conversation, tools=tools, add_generation_prompt=has_header),
                {"conversation": conversation, **options},
            )
        except TEMPLATE_ERRORS as error:  # as an answer of the engine
            raise InvalidInput(f"cannot be rendered: {error}", code="cannot_render", param="groups") from error
        return text.token_ids(False) if isinstance(text, MarkedRendering) else family.encode(text)

    return TokenSources(
        model=1,
        name_of=str,
        find_record=lambda _: None,
        find_by_logprobs=lambda logprobs: [],
        find_by_conversation=lambda prefix, answer: [],
        render=render,
        tokenize=family.encode,
        decode=decoder.decode,
        end_id=decoder.end_id,
        end_ids=decoder.end_ids,
        stop_ids=decoder.stop_ids,
        find_unnamed=lambda since: [],
    )


def train_demonstrations(
    family: Family, *demonstrations: list[dict[str, Any]], tools: Any = None, held_out: int = 0, **history: Any
) -> Trained:
    """What `model.train_sft` trains of demonstrations, by turn."""
    bodies: list[dict[str, Any]] = []
    for entries in demonstrations:
        num = sum("message" in entry or entry.get("role") == "assistant" for entry in entries)
        trajectory = {"messages_and_choices": entries, "reward": 0.0, "turn_advantages": [1.0] * num, "tools": tools}
        bodies.append({"trajectories": [trajectory | history]})
    groups = [TrajectoryGroupBody.model_validate(body) for body in bodies]
    config = TrainConfig(
        objective="likelihood", sampling="raw", allow_training_without_logprobs=True, held_out=held_out
    )
    resolved = resolve(groups, config, "p/a", sources(family), Limits(100_000, 10_000))
    texts: list[str] = []
    for group in resolved.batch.groups:
        for sequence in group.trajectories[0].sequences:
            trained = [index for index in sequence.recompute if sequence.advantages[index]]
            starts = [index for index in trained if index - 1 not in trained]
            for start in starts:
                stop = next(index for index in range(start, 10_000) if index not in trained)
                texts.append(family.decode(sequence.token_ids[start:stop]))
    return Trained(texts, resolved.report.num_trained_tokens, resolved.report)
