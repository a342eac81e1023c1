"""The memory of processes."""

import os
import subprocess
import sys

from kvlinker_lab.processes import peak_memory


def test_processes_that_have_ended_have_no_memory():
    assert peak_memory() > 2**20
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert peak_memory(process.pid) == 0  # nobody has asked for its status yet
    process.wait()
    assert peak_memory(process.pid) == 0
