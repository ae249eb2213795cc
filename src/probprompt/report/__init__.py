"""The report of runs: one HTML file to read, keep and send, and one figure of the essentials."""
