"""For every test: shapes checked as annotated, the same random numbers each time, one thread a core."""

import os
import random

import jaxtyping

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the network

# Before anything imports moe_lib: each annotated function then checks the types and shapes that go in and come out.
jaxtyping.install_import_hook("moe_lib", "beartype.beartype")

import hypothesis  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

SEED = int(os.environ.get("MOE_SEED", "0"))
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))

# No deadline: a busy machine is not a wrong answer. MOE_EXAMPLES=1000 searches longer.
hypothesis.settings.register_profile(
    "course",
    deadline=None,
    max_examples=int(os.environ.get("MOE_EXAMPLES", "50")),
    derandomize="MOE_SEED" not in os.environ,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("course")


def pytest_report_header():
    return f"seed {SEED} (MOE_SEED=… draws others), torch {torch.__version__} on {torch.get_num_threads()} threads"


@pytest.fixture(autouse=True)
def _seeded():
    """Each test starts from the same random state, whichever tests ran before it."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
