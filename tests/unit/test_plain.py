"""What must be tried without the run-time shape checks of the other tests, in an interpreter of its own."""

import subprocess
import sys

import pytest

COMPILE = """
import torch
from moe_lib import KIMI_K2, MoEBlock
config = KIMI_K2.replace(hidden_size=16, moe_intermediate_size=8, n_routed_experts=6, num_experts_per_tok=2)
blocks = {kind: MoEBlock(config, kind) for kind in ("loop", "grouped")}
compiled = {kind: torch.compile(block, backend="aot_eager") for kind, block in blocks.items()}
for kind, tokens in (("loop", 5), ("loop", 9), ("grouped", 5), ("grouped", 9)):
    x, twin = torch.randn(2, tokens, 16).unbind()
    x, twin = x.requires_grad_(), x.detach().clone().requires_grad_()
    y, expected = compiled[kind](x), blocks[kind](twin)
    torch.testing.assert_close(y, expected)
    y.sum().backward(), expected.sum().backward()
    torch.testing.assert_close(x.grad, twin.grad)
print("equal")
"""
TYPES = """
from moe_lib import KIMI_K2
for field, value in (("hidden_size", 7168.0), ("n_shared_experts", True), ("norm_topk_prob", 1), ("scoring_func", None)):
    try:
        KIMI_K2.replace(**{field: value})
    except ValueError as error:
        assert f"{field} is {value!r}; expected" in str(error), error
        continue
    raise SystemExit(f"{field}={value!r} was accepted")
print("equal")
"""


@pytest.mark.parametrize("script", [COMPILE, TYPES], ids=["compile", "types"])
def test_in_a_plain_interpreter(script):
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip().endswith("equal"), done.stderr
