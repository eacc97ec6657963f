"""The experts of a block, one implementation a file, all with the contract of contract.py: experts(rows, counts) -> rows."""

from moe_lib.experts.fp8 import Fp8Experts
from moe_lib.experts.grouped import GroupedExperts
from moe_lib.experts.int4 import Int4Experts
from moe_lib.experts.loop import LoopExperts
from moe_lib.experts.sharded import ShardedExperts

__all__ = ["Fp8Experts", "GroupedExperts", "Int4Experts", "LoopExperts", "ShardedExperts"]
