"""Two workflows for NeMo Agent Toolkit, each with an evaluator that scores it."""
