"""Traces over OTLP (extra `otlp`): one trace from a rollout to the adapter that was trained on it.

    step PROJECT/NAME              the program, from the first rollout to the end of the train call
      rollout                      the program, `art.rollout`
        chat PROJECT/NAME          the server, one for each inference request
      train PROJECT/NAME           the program, `model.train`
        job                        the server
          queued, pause, train...  the server, the phases of the job

The OpenTelemetry SDK reads the endpoint and its headers from OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_EXPORTER_OTLP_HEADERS.
A link ("TRACE-SPAN", in hexadecimal) crosses the wire as the name of a rollout's session and as the idempotency key of a
train call, so that every way to name a session carries the link. Spans hold names, numbers and the types of errors; with
OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=true the server's spans also hold the text of messages.
"""

import logging
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from art_protocol.tracking import CLOSE_SECONDS
from art_trackers.library import OneWarning, import_library

EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
CONTENTS_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""OpenTelemetry's own variable for the text of messages."""

Attributes = Mapping[str, str | int | float | bool]


class _RandomIds:
    """Ids from the operating system. OpenTelemetry draws them from `random`, which programs seed: two steps or workers
    with the same seed would then have equal idempotency keys and session names."""

    def generate_span_id(self) -> int:
        # 0 is OpenTelemetry's invalid id.
        return secrets.randbits(64) or 1

    def generate_trace_id(self) -> int:
        return secrets.randbits(128) or 1

    def is_trace_id_random(self) -> bool:
        return True


class Tracing:
    """Makes the spans of one service and delivers them to the OTLP endpoint. OpenTelemetry's global provider, which may
    be the program's, stays as it is; a span inside a span of the program is its child.

    Raises:
        ImportError: the extra `otlp` is not installed.
    """

    def __init__(self, service: str) -> None:
        self.api: Any = import_library("opentelemetry.trace", "otlp")
        sdk = import_library("opentelemetry.sdk.trace", "otlp")
        export = import_library("opentelemetry.sdk.trace.export", "otlp")
        resources = import_library("opentelemetry.sdk.resources", "otlp")
        self._warning = OneWarning("otlp")
        resource = resources.Resource.create({"service.name": service})
        # Once more, because `create` prefers its argument to OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES.
        named = resource.merge(resources.OTELResourceDetector().detect())
        # The program or server closes the tracer, with a limit. The provider's own shutdown at the exit has none.
        provider = sdk.TracerProvider(resource=named, shutdown_on_exit=False, id_generator=_RandomIds())
        exporter: Any = import_library(EXPORTER, "otlp").OTLPSpanExporter()
        failure = export.SpanExportResult.FAILURE
        self._processor = export.BatchSpanProcessor(_Exporter(exporter, failure, self._warning))
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("art")
        self.holds_contents = os.environ.get(CONTENTS_VARIABLE, "").lower() == "true"

    @classmethod
    def start_service(cls, service: str) -> Self | None:
        """The spans of a service. None, and one warning, if OpenTelemetry is not installed or refuses its settings."""
        try:
            return cls(service)
        except Exception as error:  # OpenTelemetry may raise anything
            OneWarning("otlp").give(str(error))
            return None

    def start(
        self,
        name: str,
        parent: "OpenTelemetrySpan | str | None" = None,
        attributes: Attributes | None = None,
        *,
        kind: str = "INTERNAL",
        links: Sequence[str] = (),
    ) -> "OpenTelemetrySpan":
        """A span that begins now. `parent` is a span or a link; None: the current span, if a span is current."""
        try:
            span = self._start(name, parent, attributes or {}, kind, links)
        except Exception as error:  # a configured sampler may raise anything
            self._warning.give(f"makes no span ({type(error).__name__}: {error})")
            span = self.api.INVALID_SPAN
        return OpenTelemetrySpan(self, span)

    def _start(
        self,
        name: str,
        parent: "OpenTelemetrySpan | str | None",
        attributes: Attributes,
        kind: str,
        links: Sequence[str],
    ) -> Any:
        context = None
        if isinstance(parent, OpenTelemetrySpan):
            context = self.api.set_span_in_context(parent.span)
        elif parent is not None:
            remote = self.api.NonRecordingSpan(self._context(parent))
            context = self.api.set_span_in_context(remote)
        return self._tracer.start_span(
            name,
            context=context,
            kind=self.api.SpanKind[kind],
            attributes=dict(attributes),
            links=[self.api.Link(self._context(link)) for link in links],
        )

    @property
    def has_current(self) -> bool:
        """Whether a span is current, ours or the program's."""
        return bool(self.api.get_current_span().get_span_context().is_valid)

    def close(self, limit_seconds: float = CLOSE_SECONDS) -> None:
        """Delivers the ended spans. Returns after the limit at the latest (blocking)."""
        # OpenTelemetry's flush ignores its own limit.
        flush = threading.Thread(target=self._processor.force_flush, daemon=True)
        flush.start()
        flush.join(limit_seconds)

    def _context(self, link: str) -> Any:
        trace, span = (int(part, 16) for part in link.split("-"))
        # 1: sampled. A span that is not sampled has no link.
        return self.api.SpanContext(trace, span, is_remote=True, trace_flags=self.api.TraceFlags(1))


class OpenTelemetrySpan:
    """One span. In a `with` block the span is current, and ends with the block."""

    def __init__(self, tracing: Tracing, span: Any) -> None:  # Any: OpenTelemetry's
        self.span: Any = span
        self._tracing = tracing
        self._current: Any = None

    @property
    def holds_contents(self) -> bool:
        """Whether spans hold the text of messages (`CONTENTS_VARIABLE`)."""
        return self._tracing.holds_contents

    @property
    def link(self) -> str | None:
        """The name by which spans of another process become children of this span; None if the sampler dropped the span."""
        context = self.span.get_span_context()
        if not context.trace_flags.sampled:
            return None
        return f"{context.trace_id:032x}-{context.span_id:016x}"

    def set(self, attributes: Attributes) -> None:
        self.span.set_attributes(dict(attributes))

    def end(self, error: str | None = None) -> None:
        """Ends the span; `error` is the type or the code of an error, because messages can contain text."""
        if error is not None:
            self.span.set_status(self._tracing.api.Status(self._tracing.api.StatusCode.ERROR, error))
        self.span.end()

    def __enter__(self) -> Self:
        # An exception's message can contain text of a conversation.
        current = self._current = self._tracing.api.use_span(self.span, record_exception=False)
        current.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._current is not None, "a span is left after it was entered"
        # Without the error, whose message OpenTelemetry would write into the span's status.
        self._current.__exit__(None, None, None)
        self.end(None if kind is None else kind.__name__)


class _Exporter:
    """OpenTelemetry's exporter, whose failures are one warning. Exports run one after the other, in several threads."""

    def __init__(self, exporter: Any, failure: Any, warning: OneWarning) -> None:
        self._exporter, self._failure, self._warning = exporter, failure, warning
        self._thread: int | None = None
        self._reason = "no reason given"
        logging.getLogger(EXPORTER).addFilter(self._keep)

    def export(self, spans: Sequence[Any]) -> Any:
        self._thread = threading.get_ident()
        result = self._exporter.export(spans)
        self._thread = None
        if result is self._failure:
            self._warning.give(self._reason)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def _keep(self, record: logging.LogRecord) -> bool:
        """Whether a log line is kept. The log lines of our own exports are not, because they become the reason of the warning;
        the log lines of another exporter of the program are."""
        if record.thread != self._thread:
            return True
        self._reason = record.getMessage()
        return False
