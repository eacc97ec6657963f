"""Import this before a test starts ranks: they are then forked from a server that has imported everything and checks shapes."""

import multiprocessing
import os
from pathlib import Path

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["pytest", "rank_work", "fault_work"])
_before = os.environ.get("PYTHONPATH")
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1]), _before or ""])
try:
    multiprocessing.forkserver.ensure_running()
finally:
    del os.environ["PYTHONPATH"]
    if _before is not None:
        os.environ["PYTHONPATH"] = _before
