"""Every fault of an agent and of tests, with the right end of the rollout: a reward, or the class of an error."""

from dataclasses import dataclass
from pathlib import Path

from art import harbor
from art.harbor.running import play
from plugins.harbor.tests.boxed import write_task

SANDBOX = harbor.Bubblewrap(memory_mb=64, disk_mb=16, num_processes=48)
"""Small, so that a filler is quick."""
SECONDS = 2.0
"""The limit of agents and of tests that hang."""
CHECK = '[ "$(cat hello.txt)" = hello ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n'
WORK = "echo hello > hello.txt; "


@dataclass(frozen=True)
class Fault:
    command: str
    ends: float | type[harbor.HarborError]
    test: str = CHECK
    tests_hang: bool = False


AGENTS = {
    "none": Fault(WORK, 1.0),
    "fails after its work": Fault(WORK + "exit 3", 1.0),
    "hangs": Fault("sleep 1000", 0.0),
    "hangs after its work": Fault(WORK + "sleep 1000", 1.0),
    "ignores signals": Fault(f"trap '' TERM INT HUP QUIT; {WORK} while true; do sleep 1; done", 1.0),
    "kills itself": Fault(WORK + "kill -9 $$", 1.0),
    "kills all that it may": Fault(WORK + "kill -9 -1; sleep 1000", 1.0),
    "stops itself": Fault(WORK + "kill -STOP $$", 1.0),
    "fork bomb": Fault(WORK + "bomb() { bomb | bomb & }; bomb; sleep 1000", 1.0),
    "daemon": Fault(
        "setsid nohup sh -c 'sleep 0.5; echo hello > hello.txt' >/dev/null 2>&1 & exit 0", 0.0, "sleep 1\n" + CHECK
    ),
    "daemon of a daemon": Fault(
        "(setsid sh -c '(setsid sh -c \"sleep 0.5; echo hello > hello.txt\" &) ' &) ; exit 0", 0.0, "sleep 1\n" + CHECK
    ),
    "fills the disk": Fault(
        WORK + "for file in big /tmp/big /dev/shm/big ~/big /logs/big; do cat /dev/zero > $file; done", 1.0
    ),
    "fills the disk with names": Fault(
        WORK + "mkdir d; cd d; for i in $(seq 9999); do : > $i || break; done 2>/dev/null", 1.0
    ),
    "fills memory": Fault(WORK + "python3 -c 'a = [bytearray(1 << 20) for _ in range(1 << 20)]'", 1.0),
    "fills memory with many": Fault(WORK + "for _ in $(seq 20); do head -c 40M /dev/zero | tail & done; wait", 1.0),
    "deep folders": Fault(WORK + "for i in $(seq 3000); do mkdir d && cd d; done 2>/dev/null", 1.0),
    "prints without an end": Fault(WORK + "yes", 1.0),
    "prints bytes": Fault(WORK + "head -c 9999 /dev/urandom", 1.0),
    "plants a reward": Fault("for name in txt json; do echo 1 | tee /logs/verifier/reward.$name; done", 0.0),
    "plants a link as the reward's folder": Fault(
        "rm -rf /logs/verifier; ln -s /app /logs/verifier; echo 1 > reward.txt", 0.0
    ),
    "plants a link to the reward": Fault("ln -s /logs/verifier/reward.txt hello.txt", 0.0),
    "writes the reward late": Fault(
        "(sleep 0.5; echo 1 > /logs/verifier/reward.json) & exit 0", 0.0, "sleep 1\n" + CHECK
    ),
    "plants tests": Fault("mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh", 0.0),
    "plants a link to its own tests": Fault(
        "ln -s /app /tests; echo 'echo 1 > /logs/verifier/reward.txt' > test.sh", 0.0
    ),
}
TESTS = {
    "tests hang": Fault(WORK, harbor.TestsTimedOut, "sleep 1000", tests_hang=True),
    "tests hang after the reward": Fault(
        WORK, harbor.TestsTimedOut, CHECK + "setsid sleep 1000 & wait", tests_hang=True
    ),
    "tests ignore signals": Fault(
        WORK, harbor.TestsTimedOut, "trap '' TERM INT; while true; do sleep 1; done", tests_hang=True
    ),
    "tests leave a daemon": Fault(WORK, 1.0, CHECK + "setsid sleep 1000 >/dev/null 2>&1 &"),
    "tests fail with a reward": Fault(WORK, 1.0, CHECK + "exit 1"),
    "no reward": Fault(WORK, harbor.RewardInvalid, "true"),
    "an empty reward": Fault(WORK, harbor.RewardInvalid, ": > /logs/verifier/reward.txt"),
    "NaN": Fault(WORK, harbor.RewardInvalid, "echo nan > /logs/verifier/reward.txt"),
    "a link as the reward": Fault("echo 1 > one", harbor.RewardInvalid, "ln -s /app/one /logs/verifier/reward.txt"),
    "a pipe as the reward": Fault(WORK, harbor.RewardInvalid, "mkfifo /logs/verifier/reward.json"),
    "a folder as the reward": Fault(WORK, harbor.RewardInvalid, "mkdir /logs/verifier/reward.json"),
    "a huge reward": Fault(WORK, harbor.RewardInvalid, "yes 1 | head -c 2M > /logs/verifier/reward.json"),
    "a full disk": Fault(WORK, harbor.RewardInvalid, f"cat /dev/zero > /logs/verifier/big; {CHECK}"),
}
FAULTS = AGENTS | TESTS


async def end_of(fault: Fault, folder: Path) -> float | type[BaseException]:
    """The reward of a rollout with a fault, or the class of the rollout's error. `folder` is a new one, for the task."""
    toml = f"[agent]\ntimeout_sec = {SECONDS}\n[verifier]\ntimeout_sec = {SECONDS if fault.tests_hang else 120.0}\n"
    (task,) = harbor.tasks(write_task(folder, fault.test, toml=toml))
    try:
        return (await play(task, fault.command, sandbox=SANDBOX)).reward
    except harbor.HarborError as error:
        return type(error)
