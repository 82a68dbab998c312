"""What mends faults of vLLM itself, whatever the KV cache dtype. The patches in `patches/fixes`
call it; `docs/faults.md` says which fault each module is for.
"""
