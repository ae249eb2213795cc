"""Reports of runs: an HTML page, tables, and an overview figure."""
