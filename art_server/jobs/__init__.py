"""Train requests as durable jobs: the queue on disk, and the life of one job."""
