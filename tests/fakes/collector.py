"""A local collector of OpenTelemetry traces."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """An OTLP endpoint that keeps what it gets."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.spans: list[Any] = []
        self.status = 200
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces"
                if collector.status == 200:
                    collector.take(body)
                self.send_response(collector.status)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def take(self, body: bytes) -> None:
        self.bodies.append(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            named = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(named["service.name"], span) for span in scope.spans]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def named(self, name: str) -> list[Any]:
        return [span for _, span in self.spans if span.name == name]


def attributes(span: Any) -> dict[str, Any]:
    return {
        attribute.key: getattr(attribute.value, attribute.value.WhichOneof("value")) for attribute in span.attributes
    }
