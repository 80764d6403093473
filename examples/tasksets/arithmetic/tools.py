"""The taskset's tool, a server of the Model Context Protocol in its own process."""

import verifiers.v1 as vf


class Calculator(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None  # the name is "add", not "calculator_add"

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


if __name__ == "__main__":
    Calculator.run()
