"""A container's health check: exits with 0 while GET /health answers and the engine has not failed.

    python health.py http://127.0.0.1:7623/health

An engine that is loading, or that no model needs yet, counts as healthy.
"""

import json
import sys
import urllib.request

TIMEOUT_SECONDS = 5


def main(url: str) -> None:
    with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
        health = json.load(answer)
    if health["engine"] == "failed":
        sys.exit(f"the engine has failed: {health['detail'] or 'the server logs why'}")
    print(f"engine: {health['engine']}")


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except OSError as error:
        sys.exit(f"no answer from {sys.argv[1]}: {error}")
