"""A client of the crowd in Python: reads "PATH<tab>JSON" lines, posts each JSON to the server at $ART, and prints the replies."""

import os
import sys
import urllib.request

for line in sys.stdin:
    path, body = line.rstrip("\n").split("\t")
    headers = {"content-type": "application/json", "authorization": f"Bearer {os.environ['KEY']}"}
    request = urllib.request.Request(os.environ["ART"] + path, body.encode(), headers)
    with urllib.request.urlopen(request) as reply:
        print(reply.read().decode().replace("\n", " "), flush=True)
