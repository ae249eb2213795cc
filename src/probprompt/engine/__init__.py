"""Build a model, train it task by task, score it, save it."""
