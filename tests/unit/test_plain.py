"""What must be tried without the run-time shape checks of the other tests, in an interpreter of its own."""

import subprocess
import sys

import pytest

COMPILE = """
import torch
from moe_lib import KIMI_K2, MoEBlock
block = MoEBlock(KIMI_K2.replace(hidden_size=16, moe_intermediate_size=8, n_routed_experts=6, num_experts_per_tok=2), "{kind}")
compiled = torch.compile(block, backend="aot_eager")
for tokens in (5, 5, 9, 1):
    x, twin = torch.randn(2, tokens, 16).unbind()
    x, twin = x.requires_grad_(), x.detach().clone().requires_grad_()
    y, expected = compiled(x), block(twin)
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


@pytest.mark.parametrize(
    "script", [COMPILE.replace("{kind}", "loop"), COMPILE.replace("{kind}", "grouped"), TYPES], ids=["loop", "grouped", "types"]
)
def test_in_a_plain_interpreter(script):
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip().endswith("equal"), done.stderr
