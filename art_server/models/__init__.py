"""Models and their base: the base model is found and loaded; a model is registered, forked, rolled back, uploaded, deleted."""
