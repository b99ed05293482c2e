"""Who may ask, for how much, and from where. What a caller's priority is stands in `api/tiers.py`."""
