"""What client and server exchange: the bodies of requests and replies, the formats of stored trajectories, and the rules that
both sides follow. The package needs pydantic only. The server's and the trainer's processes load this package, and not `art`.
"""
