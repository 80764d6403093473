"""The server and its family are killed between two steps."""

from tests.live import PROJECT, Server, descendants, register, sampled_group, train, train_one_step
from tests.processes import wait_until_gone


def test_the_server_is_killed_between_steps(server: Server) -> None:
    register(server, "between")
    assert train_one_step(server, "between")["step"] == 1
    assert server.process is not None
    family = descendants(server.process.pid)
    assert len(family) >= 3
    server.kill()
    wait_until_gone(family)
    server.start()
    with server.client() as client:
        assert client.get(f"/api/models/{PROJECT}/between").json()["step"] == 1
        group = sampled_group(client, f"{PROJECT}/between")  # waits for the engine
        done = train(client, "between", [group])[-1]
    assert done["step"] == 2
    optimizer = server.model_dir("between") / "checkpoints" / "0002" / "optimizer.safetensors"
    from safetensors.torch import load_file

    steps = {float(value) for key, value in load_file(optimizer).items() if key.endswith("step")}
    assert steps == {2.0}, "the optimizer went on from the state of step 1"
