"""HTTP only: routes, the door, and the gate's OpenAI-compatible side. Decisions live in the packages behind it."""
