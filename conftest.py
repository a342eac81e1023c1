"""Divides the tests among processes by recorded durations, and holds the core to its budget."""

from __future__ import annotations

import json
import os
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from pathlib import Path

import psutil
import pytest
from xdist.workermanage import WorkerController

ROOT = Path(__file__).parent
DURATIONS = ROOT / "tests" / "durations.json"
"""The seconds of each test file, by the expression of ``-m`` that chose its tests; written by
``--record-durations``."""

TOGETHER = ("tests/doors/page", "lab/tests/training")
"""Folders whose files share what takes long to make, such as a browser: one process runs them."""

WHOLE = (
    "integrations/kvlinker-fleet/tests",
    "lab/tests",
    "tests/cli/test_search.py",
    "tests/doors/http/test_building.py",
    "tests/doors/http/test_embeddings.py",
    "tests/doors/http/test_kept_answers.py",
    "tests/doors/http/test_passages_ahead.py",
    "tests/doors/http/test_prefetch.py",
    "tests/doors/http/test_shared_catalog.py",
    "tests/doors/http/test_stock_clients.py",
    "tests/doors/http/test_workflows.py",
    "tests/doors/test_request_tools.py",
    "tests/engines/embedded/attention/test_torch_kernels.py",
    "tests/engines/embedded/execution/graphs",
    "tests/engines/embedded/execution/test_native_experts.py",
    "tests/engines/embedded/execution/test_two_threads.py",
    "tests/engines/embedded/model/recording",
    "tests/engines/embedded/model/weights",
    "tests/engines/embedded/requests/test_explaining.py",
    "tests/engines/embedded/test_policy_limits.py",
    "tests/engines/gpu",
    "tests/quality",
    "tests/real_models",
    "tests/service/audit",
    "tests/store/tiers/test_object_tier.py",
    "tests/store/tiers/test_remote_faults.py",
)
"""Folders and files of tests that are all beyond the core, by which it keeps its budget: of the
laboratory, of measurements, of real models, of GPUs, whose kernels are interpreted here, of fleets,
of quantised weights, of what only agents use, and of parts whose results the core's tests compare
as a whole."""

CORE = "not (matrix or whole)"
"""What ``-m`` says for ``--core``."""

IMPORTING = 0.2
"""The seconds that a test file takes beside its tests, about: to import it, and to collect them."""

SUM, SUM_SECONDS = compile("x = 0\nfor i in range(1_000_000): x += i", "sum", "exec"), 0.065
"""A sum, which calls and allocates as most of Python does (an empty loop does not: by it, a
processor that is slow at calls passes for a fast one), and the seconds within which a processor of
the usual speed computes it."""

DEAREST = 10
"""The number of tests that are named when the budget is exceeded."""

FILES = pytest.StashKey[frozenset[Path]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvlinker")
    group.addoption("--core", action="store_true", help="run the core, and import nothing else")
    group.addoption("--budget", type=float, help="fail if the session takes more seconds")
    group.addoption("--shard", default="1/1", help="run this part of the test files, as 2/5")
    group.addoption("--record-durations", action="store_true", help=f"write {DURATIONS.name}")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the files of this shard and, in a worker of pytest-xdist, of this worker: with
    ``--dist each`` a worker runs all that it collects, and it collects its own files alone."""
    if config.option.core:
        config.option.markexpr = CORE
    recorded = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    seconds = recorded.get(config.option.markexpr, {})
    part, parts = map(int, config.option.shard.split("/"))
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"--shard is {config.option.shard}: the first shard is 1/{parts}")
    files = divide(_test_files(config), seconds, parts)[part - 1]
    worker = getattr(config, "workerinput", {})
    if worker.get("divides"):
        number = int(worker["workerid"].removeprefix("gw"))
        files = divide(files, seconds, worker["workercount"])[number]
    config.stash[FILES] = frozenset(files)
    if not worker:
        config.pluginmanager.register(Clock(config))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """Tell a worker whether the files are divided: it does not know the option."""
    node.workerinput["divides"] = node.config.option.dist == "each"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no test file that another shard or worker runs."""
    is_others = collection_path.match("test_*.py") and collection_path not in config.stash[FILES]
    return True if is_others else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark property tests, and what is beyond the core by its folder, so that ``-m`` can choose."""
    for item in items:
        if _is_whole(item.path):
            item.add_marker(pytest.mark.whole)
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.examples)


def divide(files: Collection[Path], seconds: Mapping[str, float], parts: int) -> list[list[Path]]:
    """Divide ``files`` into ``parts`` of similar duration: the longest first, each into the part
    that has least so far. A file without recorded ``seconds`` counts as the median of those that
    have any."""
    typical = statistics.median(filter(None, seconds.values())) if any(seconds.values()) else 1.0
    units: defaultdict[str, list[Path]] = defaultdict(list)
    lengths: defaultdict[str, float] = defaultdict(float)
    for file in sorted(files):
        name = file.relative_to(ROOT).as_posix()
        unit = next((folder for folder in TOGETHER if name.startswith(f"{folder}/")), name)
        units[unit].append(file)
        lengths[unit] += IMPORTING + seconds.get(name, typical)
    shares: list[list[Path]] = [[] for _ in range(parts)]
    sums = [0.0] * parts
    for unit, length in sorted(lengths.items(), key=lambda each: (-each[1], each[0])):
        least = sums.index(min(sums))
        shares[least] += units[unit]
        sums[least] += length
    return shares


def _test_files(config: pytest.Config) -> set[Path]:
    """Return the test files that the command line asks for; for the core, those it may run."""
    roots = [config.invocation_params.dir / arg.partition("::")[0] for arg in config.args]
    found = {file for root in roots for file in ([root] if root.is_file() else root.rglob("*.py"))}
    files = {file.resolve() for file in found if file.match("test_*.py")}
    return {file for file in files if not (config.option.core and _is_whole(file))}


def _is_whole(file: Path) -> bool:
    return any(file.is_relative_to(ROOT / path) for path in WHOLE)


class Clock:
    """Knows what each test took, and what the session took of the machine."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._collected = 0
        self._session: pytest.Session | None = None
        self._began = time.monotonic()
        self._slowness = _slowness()
        self._busy, self._own = _busy_seconds(), _own_seconds()

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Remember the session."""
        self._session = session

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Count the tests of all workers."""
        self._collected += len(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up set-up, call and teardown. Subtests are parts of the call."""
        if not isinstance(report, pytest.SubtestReport):
            self._seconds[report.nodeid] += report.duration
        if self._session is not None and self._collected:
            self._session.testscollected = self._collected  # by which percentages are shown

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail over the budget. An empty shard is no failure."""
        shard = self._config.option.shard
        if shard != "1/1" and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK
        if self._config.option.record_durations:
            self._record()
        self._taken = self._seconds_alone()
        budget = self._config.option.budget
        self._over = budget is not None and self._taken > budget
        if self._over and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say how much of the budget is used, and what uses most of it where that is too much."""
        budget = self._config.option.budget
        if budget is None:
            return
        line = (
            f"{self._taken:.0f} s without other processes' time, on a processor of the usual speed,"
            f" of a budget of {budget:.0f} s"
        )
        terminalreporter.write_line(line, red=self._over, green=not self._over)
        if self._over:
            dearest = sorted(self._seconds.items(), key=itemgetter(1), reverse=True)[:DEAREST]
            for nodeid, seconds in dearest:
                terminalreporter.write_line(f"{seconds:8.1f} s  {nodeid}")

    def _seconds_alone(self) -> float:
        """Return the seconds that the session would have taken on an idle machine of the usual
        speed, about: what other processes computed meanwhile is taken off, and a slow processor's
        seconds count less, so that a busy or slow machine fails no session."""
        elapsed = time.monotonic() - self._began
        own = _own_seconds() - self._own
        others = max(0.0, _busy_seconds() - self._busy - own)
        return (elapsed - others / (os.cpu_count() or 1)) / max(self._slowness, _slowness())

    def _record(self) -> None:
        recorded = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
        asked = (file.relative_to(ROOT).as_posix() for file in self._config.stash[FILES])
        files = dict.fromkeys(asked, 0.0)  # also those none of whose tests were chosen
        for nodeid, seconds in self._seconds.items():
            files[nodeid.partition("::")[0]] += seconds
        mine = recorded.setdefault(self._config.option.markexpr, {})
        mine |= {file: round(seconds, 1) for file, seconds in files.items()}
        recorded[self._config.option.markexpr] = {
            file: mine[file] for file in sorted(mine) if (ROOT / file).exists()
        }
        DURATIONS.write_text(json.dumps(recorded, indent=1) + "\n")


def _slowness() -> float:
    """Return how many times as long as one of the usual speed this processor takes for a sum, at
    least 1."""
    seconds = []
    for _ in range(5):
        began = time.thread_time()
        exec(SUM, {})
        seconds.append(time.thread_time() - began)
    return max(1.0, min(seconds) / SUM_SECONDS)


def _busy_seconds() -> float:
    """Return the seconds for which the machine's processors have computed since it started, those
    that a hypervisor took away included."""
    times = psutil.cpu_times()
    return sum(
        getattr(times, name, 0.0) for name in ("user", "system", "nice", "irq", "softirq", "steal")
    )


def _own_seconds() -> float:
    """Return the processor seconds of this process and of its children that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
