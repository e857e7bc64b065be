"""The study behind the results. The program imports nothing of it."""
