"""int4_kivi for vLLM: the cache format, its kernels, and how vLLM uses them.

Start with ``format.py`` (what a page is), then ``reference.py`` (what a step does to pages).
"""
