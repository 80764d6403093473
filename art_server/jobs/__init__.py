"""Train requests as durable jobs: accepted, queued on disk, run by the trainer process."""
