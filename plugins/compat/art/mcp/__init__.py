"""Scenarios for agents that use the tools of an MCP server (ART's `art.mcp`)."""

from art.mcp.scenarios import generate_scenarios
from art.mcp.types import GeneratedScenario, GeneratedScenarioCollection, MCPResource, MCPTool

__all__ = [
    "GeneratedScenario",
    "GeneratedScenarioCollection",
    "MCPResource",
    "MCPTool",
    "generate_scenarios",
]
