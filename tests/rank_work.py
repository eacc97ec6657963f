"""What test ranks are told to do, by name. Runs in their processes; shapes are checked there too."""

import jaxtyping

jaxtyping.install_import_hook("moe_lib", "beartype.beartype")

import ctypes  # noqa: E402
import threading  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from safetensors import safe_open  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from moe_lib import MoEBlock, MoEConfig  # noqa: E402
from moe_lib.expert_parallel import fill_from_seed, sharded_block, sum_replicated_gradients  # noqa: E402
from moe_lib.experts import GroupedExperts, LoopExperts, ShardedExperts  # noqa: E402
from moe_lib.experts.sharded import all_to_all, rank_experts  # noqa: E402

LOCAL = {"loop": LoopExperts, "grouped": GroupedExperts}


def sharded(group, config: MoEConfig, kind: str, dtype=None) -> MoEBlock:
    local = LOCAL[kind](config, rank_experts(config, group.size(), group.rank()), dtype=dtype)
    return MoEBlock(config, ShardedExperts(local, group), dtype=dtype)


def block_step(
    group, config: MoEConfig, kind: str, tensors: dict[str, Tensor], shares: list[Tensor], x_needs_grad: bool, autocast: bool
):
    """Forward and backward of this rank's share of the tokens; everything that can be compared with one process.

    Gradients of what every rank holds are summed over ranks, as data parallelism does; those of experts are left as they are.
    """
    dtype = shares[0].dtype
    block = sharded(group, config, kind, dtype)
    block.load_hf(tensors)
    x = shares[group.rank()].clone().requires_grad_(x_needs_grad)
    with torch.autocast("cpu", enabled=autocast):
        y = block(x)
    (y.double().square().sum() + y.double().sum()).backward()
    grads = {}
    for name, part in (("gate", block.gate), ("shared_experts", block.shared_experts)):
        for key, parameter in part.named_parameters() if part is not None else ():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(grad, group=group)
            grads[f"{name}.{key}"] = grad
    for parameter in block.experts.parameters():
        parameter.data, parameter.grad = (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad), None
    grads |= {f"experts.{key}": tensor for key, tensor in block.experts.to_hf().items()}
    return {"y": y.detach(), "x.grad": x.grad, "grads": grads}


class Stamp(nn.Module):
    """Experts without weights that write down what they got: row r of expert e comes back as row * 1000 + e."""

    def __init__(self, local: range) -> None:
        super().__init__()
        self.local = local

    def forward(self, rows, counts):
        self.got = rows.clone()
        return rows * 1000 + torch.tensor(list(self.local)).repeat_interleave(counts)[:, None]


def stamp(group, counts: list[list[int]]):
    """Send labelled rows (rank * 100 + number) through experts that stamp their number on them."""
    share = len(counts[0]) // group.size()
    experts = ShardedExperts(Stamp(range(group.rank() * share, (group.rank() + 1) * share)), group)
    mine = torch.tensor(counts[group.rank()])
    rows = group.rank() * 100 + torch.arange(float(mine.sum()))[:, None].double()
    exchange = experts.exchange_counts(rows, mine)
    out = experts(rows, mine)
    return {"out": out[:, 0], "got": experts.local_experts.got[:, 0], "arriving": exchange.arriving, "receive": exchange.receive}


def bytes_travel(group, parts: list[list[Tensor]]):
    """parts[s][d] goes from rank s to rank d."""
    mine = parts[group.rank()]
    rows = torch.cat(mine)
    return all_to_all(rows, [len(parts[s][group.rank()]) for s in range(group.size())], [len(p) for p in mine], group)


def wrong_splits(group, send: list[int], receive: list[int], rows: int):
    return all_to_all(torch.zeros(rows, 2), receive, send, group)


def wrong_rows(group, config: MoEConfig, wrong: dict[int, tuple]):
    """Rank r in `wrong` gives (rows, width, dtype, counts); the others none. Afterwards the group must still work."""
    experts = sharded(group, config, "loop").experts
    n, width, dtype, counts = wrong.get(group.rank(), (0, config.hidden_size, torch.float32, [0] * config.n_routed_experts))
    try:
        experts(torch.zeros(n, width, dtype=dtype), torch.tensor(counts, dtype=torch.int64))
    except ValueError as error:
        said = str(error)
    else:
        said = None
    again = experts(
        torch.zeros(config.n_routed_experts, config.hidden_size), torch.ones(config.n_routed_experts, dtype=torch.int64)
    )
    return said, tuple(again.shape)


def grad_modes(group, config: MoEConfig, without: list[int]):
    block = sharded(group, config, "loop")
    x = torch.randn(2, config.hidden_size)
    with torch.set_grad_enabled(group.rank() not in without):
        return block(x).requires_grad


def frozen(group, config: MoEConfig):
    block = sharded(group, config, "grouped").requires_grad_(False)
    return block(torch.randn(2, config.hidden_size)).requires_grad


def shares_refused(group, config: MoEConfig, local: list[range]):
    return len(ShardedExperts(LoopExperts(config, local[group.rank()]), group).local)


def state(group, config: MoEConfig, kind: str, whole: dict[str, Tensor]):
    """Load a whole block's tensors, give back this rank's, by to_hf and by state_dict."""
    block = sharded(group, config, kind)
    block.load_hf(whole)
    other = sharded(group, config, kind)
    other.load_state_dict(block.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(other.to_hf().values(), block.to_hf().values()))
    return {"hf": block.to_hf(), "state": dict(block.state_dict())}


def mesh(group, config: MoEConfig):
    """The same block over one dimension of a mesh of all ranks: 2 rows of size/2 ranks that share experts."""
    from torch.distributed.device_mesh import init_device_mesh

    both = init_device_mesh("cpu", (2, group.size() // 2), mesh_dim_names=("replica", "ep"))
    ep = both["ep"]
    experts = ShardedExperts(LoopExperts(config, rank_experts(config, ep.size(), ep.get_local_rank())), ep)
    try:
        ShardedExperts(LoopExperts(config), both)
    except ValueError as error:
        said = str(error)
    y = MoEBlock(config, experts)(torch.randn(3, config.hidden_size))
    return {"shape": tuple(y.shape), "local": experts.local_experts.local, "said": said}


def ranks_of(group):
    return group.rank(), group.size()


def seeded(group, config: MoEConfig, seed: int):
    block = sharded_block(config, group, "loop" if group.rank() % 2 else "grouped")
    fill_from_seed(block, seed)
    return block.to_hf()


M_MMAP_THRESHOLD = -3  # glibc's malloc.h


class Peak:
    """The most anonymous memory that this process held, looked at every millisecond; pages of a mapped file are not its own."""

    def __enter__(self):
        self.before, self.most, self.over = self.now(), 0, threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        while not self.over.wait(0.001):
            self.most = max(self.most, self.now() - self.before)

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
        self.most = max(self.most, self.now() - self.before)

    @staticmethod
    def now() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def peak_of_building(group, config: MoEConfig, dtype, path: str | None):
    """Bytes by which this process grew at most while it built and filled its part."""

    def build(config: MoEConfig):
        block = sharded_block(config, group, "grouped", dtype=dtype)
        if path is None or config.hidden_size == 32:
            fill_from_seed(block, 1)
        else:
            with safe_open(path, "pt") as file:
                names, mine = set(file.keys()), block.to_hf().keys()
                block.load_hf({name: file.get_tensor(name) for name in names & mine})
        return block

    # Every tensor gets pages of its own and gives them back: memory that was freed before, or is not returned, would count wrong.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    build(config.replace(hidden_size=32, moe_intermediate_size=8))  # what a first block brings along
    with Peak() as peak:
        build(config)
    return peak.most


def train(group, config: MoEConfig, seed: int, x: Tensor, target: Tensor):
    """Two steps, each rank on its half of the tokens."""
    block = sharded_block(config, group)
    fill_from_seed(block, seed)
    optimizer = torch.optim.SGD(block.parameters(), 0.05, momentum=0.9)
    for inputs, wanted in zip(x, target):
        half = slice(group.rank(), None, group.size())
        optimizer.zero_grad()
        (block(inputs[half]) - wanted[half]).square().sum().backward()
        sum_replicated_gradients(block, group)
        optimizer.step()
    return block.to_hf()
