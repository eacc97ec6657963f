"""Kimi K2's mixture-of-experts block, from one SwiGLU expert to 384 of them: the package behind the notebooks."""

from moe_lib.block import MoEBlock, combine, dispatch
from moe_lib.config import DEEPSEEK_V3, KIMI_K2, MoEConfig
from moe_lib.expert import SwiGLUExpert, swiglu
from moe_lib.router import Router, Routing

__all__ = ["DEEPSEEK_V3", "KIMI_K2", "MoEBlock", "MoEConfig", "Router", "Routing", "SwiGLUExpert", "combine", "dispatch", "swiglu"]
