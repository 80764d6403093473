"""Engine and trainer on separate cores: sampling continues while a step trains."""

import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.live import PROJECT, Server, chat, find_process, register, sampled_group, train_one_step


@pytest.mark.skipif(sys.platform != "linux", reason="cores are given to processes on Linux")
def test_the_gate_stays_open_while_a_step_trains(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("takes two cores")
    server = Server(tmp_path)
    server.arguments = ["--base-model", "art/tiny", "--max-seq-length", "1024"]
    server.arguments += ["--serve-devices", str(cores[0]), "--train-devices", str(cores[1])]
    server.start()
    try:
        server.wait_ready()
        register(server, "a")
        train_one_step(server, "a")  # the first job on a base also checks its layers
        model = f"{PROJECT}/a"
        trainer = find_process(server, "art_server.trainer.worker")
        engine = find_process(server, "art_server.engine.vllm_process.child")
        assert psutil.Process(trainer).cpu_affinity() == [cores[1]]
        workers = [psutil.Process(engine), *psutil.Process(engine).children(recursive=True)]
        assert all(worker.cpu_affinity() == [cores[0]] for worker in workers)
        with server.client() as client:
            body = {"groups": [sampled_group(client, model)]}
            os.kill(trainer, signal.SIGSTOP)  # the step lasts until the trainer is continued
            with client.stream("POST", f"/api/models/{PROJECT}/a/train", json=body) as response:
                events = (json.loads(line) for line in response.iter_lines())
                next(event for event in events if event.get("phase") == "train")
                with server.client() as other:
                    meanwhile = chat(other, model, n=4)
                os.kill(trainer, signal.SIGCONT)
                done = list(events)[-1]
            assert [choice["art"]["step"] for choice in meanwhile["choices"]] == [1] * 4
            assert (done["event"], done["step"]) == ("done", 2)
            assert chat(client, model)["choices"][0]["art"]["step"] == 2
    finally:
        server.stop()
