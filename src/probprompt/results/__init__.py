"""The results book: one committed file per run, and a page with our numbers beside the paper's."""
