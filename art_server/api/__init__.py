"""The HTTP layer: routes, authentication, the OpenAI-compatible proxy. The logic is in the packages that it calls."""
