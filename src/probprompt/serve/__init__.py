"""HTTP service of a model: predictions, teaching, history, and a web page."""
