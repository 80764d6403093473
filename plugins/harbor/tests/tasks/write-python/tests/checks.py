"""The agent's module runs in processes of its own. This process writes the reward, after their end."""

import os
import subprocess
from pathlib import Path

examples = [int(word) for word in os.environ["EXAMPLES"].split()]
passed = 0
for number in examples:
    code = f"from double import double; print(double({number}))"
    ran = subprocess.run(["python3", "-c", code], capture_output=True, text=True, check=False)
    passed += ran.stdout.strip() == str(2 * number)
Path("/logs/verifier/reward.txt").write_text(str(passed / len(examples)))
