"""Settings for every test: hypothesis without a deadline; each process its share of cores.

In CI, hypothesis draws the same 60 examples each time; elsewhere 40 new ones, unless a test says how many it needs. On an
emulated processor it draws the same 10 (see processors.py).

With `-n 2`, as make runs them, processes take the files of tests in turn and share the threads: a test may
rely on nothing that a test of another file has made, and on no port, folder or moment of its own choice.
"""

import os

from hypothesis import settings

from example_count import EMULATED, limit_examples

settings.register_profile("here", deadline=None, print_blob=True, max_examples=40)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True, max_examples=60)
settings.register_profile("emulated", settings.get_profile("ci"), max_examples=limit_examples(100))
settings.load_profile("emulated" if EMULATED else "ci" if os.environ.get("CI") else "here")

if together := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):  # before torch is imported, here and in processes that tests begin
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(together))))

if os.environ.get("REGARD_TESTS_WITHOUT_OPENMP"):  # see processors.py
    from regard.compiled import threads

    threads.find_torch_symbol = lambda name: None
