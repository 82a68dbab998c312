"""`s4kv plan`: what fits on a GPU before one is rented.

Read in this order: `gpus.py` (what there is to rent), `weights.py` (what a model takes),
`memory.py` (what is left for the cache), `cache.py` (how many tokens and users that is),
`sizing.py` (all of it for one machine), `report.py` (as text), `cli.py`.
"""
