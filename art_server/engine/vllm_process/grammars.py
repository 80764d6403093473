"""Grammars in vLLM's engine: the backend that has checked a grammar compiles it, and no grammar allows endless blanks.

vLLM checks a grammar with xgrammar, or with guidance if xgrammar cannot express it, but compiles every grammar with
the backend of the engine's first grammar. That backend then ignores what it does not know, or fails. Between the elements of
JSON both backends allow any amount of white space, in which a small model gets lost until its limit of tokens.
"""

import json
import threading
from typing import Any

MAX_BLANKS = 32
"""White space characters between two elements of JSON: the indentation of eight levels by four."""

BLANKS = rf"[ \t\r\n]{{0,{MAX_BLANKS}}}"


def install() -> None:
    """Patches vLLM's structured outputs in this process."""
    from vllm.v1.structured_output import StructuredOutputManager, backend_guidance
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    use_own_backends(StructuredOutputManager)
    limit_xgrammar(XgrammarBackend)
    limit_guidance(backend_guidance)


def use_own_backends(manager_class: Any) -> None:
    """Compiles each request's grammar with the backend that vLLM chose for it."""
    init = manager_class.grammar_init
    # Re-entrant: with an external launcher vLLM compiles inside `grammar_init`.
    lock = threading.RLock()

    def grammar_init(self: Any, request: Any) -> None:
        if request.structured_output_request is None:
            return
        kind = request.sampling_params.structured_outputs._backend
        backends = vars(self).setdefault("backends", {})
        with lock:
            self.backend = backends.get(kind)  # None: vLLM makes the backend
            self.backend_name = kind if self.backend else None  # vLLM 0.33 refuses a grammar for another one
            init(self, request)
            backends[kind] = self.backend

    def create_grammar(self: Any, request: Any) -> Any:
        """Runs in a thread that `grammar_init` starts."""
        kind = request.sampling_params.structured_outputs._backend
        with lock:
            backend = self.backends.get(kind) or self.backend
        grammar = backend.compile_grammar(
            *request.structured_output_request.structured_output_key,
            stop_token_ids=request.sampling_params.all_stop_token_ids,
        )
        first = backend.allocate_token_bitmask(1)
        grammar.fill_bitmask(first, 0)
        if not first.any():
            raise ValueError("no text satisfies the grammar")
        return grammar

    manager_class.grammar_init = grammar_init
    manager_class._create_grammar = create_grammar


class LimitedCompiler:
    """xgrammar's compiler, with a limit for the white space between elements of JSON."""

    def __init__(self, compiler: Any):
        self._compiler = compiler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiler, name)

    def compile_json_schema(self, schema: Any, **options: Any) -> Any:
        if options.get("any_whitespace", True):
            options["max_whitespace_cnt"] = MAX_BLANKS
        return self._compiler.compile_json_schema(schema, **options)

    def compile_structural_tag(self, *arguments: Any) -> Any:
        from xgrammar import StructuralTag

        if len(arguments) == 2:  # the older form: tags and triggers
            tag = StructuralTag.from_legacy_structural_tag(*arguments).model_dump(by_alias=True)
        else:
            tag = json.loads(arguments[0])
        return self._compiler.compile_structural_tag(json.dumps(with_limit(tag)))


def with_limit(tag: Any) -> Any:
    """A structural tag in which every JSON schema without a limit of white space has ours."""
    if isinstance(tag, list):
        return [with_limit(part) for part in tag]
    if not isinstance(tag, dict):
        return tag
    limited = {key: value if key == "json_schema" else with_limit(value) for key, value in tag.items()}
    if tag.get("type") == "json_schema" and limited.get("max_whitespace_cnt") is None:
        limited["max_whitespace_cnt"] = MAX_BLANKS
    return limited


def limit_xgrammar(backend_class: Any) -> None:
    post_init = backend_class.__post_init__

    def limited(self: Any) -> None:
        post_init(self)
        self.compiler = LimitedCompiler(self.compiler)
        if hasattr(self, "full_vocab_compiler"):  # vLLM 0.33's compiler of structural tags
            self.full_vocab_compiler = LimitedCompiler(self.full_vocab_compiler)

    backend_class.__post_init__ = limited


def limit_guidance(module: Any) -> None:
    """llguidance has no limit for white space, but takes regular expressions as the separators."""
    matcher = module.llguidance.LLMatcher
    serialize = module.serialize_guidance_grammar

    def serialize_limited(kind: Any, spec: Any, disable_any_whitespace: bool = False, *others: Any) -> str:
        names = {"JSON": spec, "JSON_OBJECT": '{"type": "object"}'}
        if kind.name not in names or disable_any_whitespace or any(others):
            return serialize(kind, spec, disable_any_whitespace, *others)
        return matcher.grammar_from_json_schema(
            names[kind.name],
            defaults={
                "whitespace_flexible": False,
                "item_separator": f"{BLANKS},{BLANKS}",
                "key_separator": f"{BLANKS}:{BLANKS}",
            },
        )

    module.serialize_guidance_grammar = serialize_limited
