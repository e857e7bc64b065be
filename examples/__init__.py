"""A search with trained policies, a task of one's own, and bridges to other trainers."""
