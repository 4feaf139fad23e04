"""The layer and its parts, as ``tutel.moe`` has them."""

from .layer import moe_layer
from .routing import (
    extract_critical,
    fast_cumsum_sub_one,
    fast_decode,
    fast_dispatcher,
    fast_encode,
    get_dispatch_count,
    get_reversed_sample_ids,
    get_topk_selection,
    top_k_routing,
)

__all__ = [
    "extract_critical",
    "fast_cumsum_sub_one",
    "fast_decode",
    "fast_dispatcher",
    "fast_encode",
    "get_dispatch_count",
    "get_reversed_sample_ids",
    "get_topk_selection",
    "moe_layer",
    "top_k_routing",
]
