"""`s4kv compare`: is a KV cache dtype as good, as large and as fast as another, on your model?

Read in this order: `sides.py` (what is compared), `plan.py` (in which order), `run.py` (how a
piece is measured and kept), `quality.py`, `capacity.py`, `fill.py` and `speed.py` (the pieces),
`figures.py` and `verdict.py` (what they mean together), `report.py`.
"""
