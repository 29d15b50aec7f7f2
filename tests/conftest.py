"""Settings of all tests: no clocks in property tests, fewer examples in the sample."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from pipeinfer.llama.library import llama_kernels, llama_version
from pipeinfer.llama.loader import PREBUILT
from pipeinfer.models.locate import EMBEDDED, open_tokenizer
from pipeinfer.models.text.tokenizer import Tokenizer

settings.register_profile("full", deadline=None, derandomize="CI" in os.environ,
                          suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("sample", settings.get_profile("full"), max_examples=10)


def pytest_configure(config: pytest.Config) -> None:
    """Before tests are imported: `tests.kit.sample` reads the profile then."""
    settings.load_profile("full" if config.getoption("full") else "sample")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's: other workers have the other cores


#: tests that start real jobs by the dozen, or with `-t 1`
_JOBS = ("tests/mpi/", "tests/models/test_hub.py", "tests/supervise/test_up.py",
         "tests/namespaces/test_cut.py", "tests/cli/test_ablations.py",
         "tests/supervise/test_race.py", "tests/server/test_page", "tests/cluster/test_generate.py")


@pytest.fixture(scope="module", autouse=True)
def one_thread_a_rank(request: pytest.FixtureRequest) -> Iterator[None]:
    """Jobs of the sample do not try out how many threads they are fastest with: for models as
    small as these that takes longer than all they decode. The full run does, and so do in the
    sample the jobs of tests/test_wheel.py and of tests/namespaces/test_namespaces.py."""
    if request.config.getoption("full") or not request.node.nodeid.startswith(_JOBS):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPEINFER_THREADS", "1")
        patch.setenv("PIPEINFER_THREADS_DRAFT", "1")
        yield


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """On what tests run that are coroutine functions, which have the mark `anyio`."""
    return "asyncio"


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    """The embedded target's."""
    opened = open_tokenizer(EMBEDDED / "target.gguf")
    yield opened
    opened.close()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """One architecture came after the library that --native compiles."""
    if "k2-horizon" in item.nodeid and not llama_version().startswith(PREBUILT.name):
        pytest.skip("this llama.cpp does not know it")


def pytest_report_header() -> str:
    """Tests have to pass on every build of llama.cpp; say on which they ran."""
    return f"llama.cpp: {llama_version()}, compiled for {llama_kernels()}"
