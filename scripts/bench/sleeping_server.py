"""An art-server whose steps last at least some seconds, to imitate the time of a trainer on a separate device.

python scripts/bench/sleeping_server.py SECONDS [art-server's flags]
"""

import sys
import time
from typing import Any


def serve() -> None:
    from art_server import cli
    from art_server.jobs import trainer_process
    from art_server.shared.trainer_messages import WorkerConfig

    seconds, command = sys.argv.pop(1), trainer_process.worker_command

    def sleeping(config: WorkerConfig) -> list[str]:
        return [sys.executable, __file__, "--worker", seconds, *command(config)[3:]]

    trainer_process.worker_command = sleeping
    cli.main()


def work() -> None:
    from art_server.process.children import claim_stdout
    from art_server.trainer import tasks, worker

    sys.argv.pop(1)
    seconds, train = float(sys.argv.pop(1)), tasks.train

    def slowly(*args: Any, **kwargs: Any) -> Any:
        until = time.monotonic() + seconds
        result = train(*args, **kwargs)
        time.sleep(max(0.0, until - time.monotonic()))
        return result

    tasks.train = slowly
    worker.main(claim_stdout())


if __name__ == "__main__":
    work() if sys.argv[1] == "--worker" else serve()
