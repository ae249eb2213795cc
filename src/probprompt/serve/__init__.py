"""A model as an HTTP service: predictions for images that people send, new classes that they teach, and a page."""
