"""A vLLM plugin that damages the KV cache of one side, for `test_compare.py`.

vLLM loads it in every process of a server. Where the settings ask for plain keys, every sealed
page loses its value codes before it is read: the answers that follow are wrong, and nothing
crashes. All other sides are left as they are.
"""

from __future__ import annotations


def damage() -> None:
    from vllm.config import get_current_vllm_config

    from s4kv_ext import cpu_ops, format, impl
    from s4kv_ext.settings import plain_keys

    attend = cpu_ops.attend

    def broken(query, key, value, sealed, *rest):
        first, size = format.sections(key.shape[-1])["value_code"]
        sealed.view(dtype=sealed.dtype)[..., first : first + size] = 0
        return attend(query, key, value, sealed, *rest)

    init = impl.Int4KiviImpl.__init__

    def look(self, *args, **kwargs):
        init(self, *args, **kwargs)
        if plain_keys(get_current_vllm_config()):
            cpu_ops.attend = broken

    impl.Int4KiviImpl.__init__ = look
