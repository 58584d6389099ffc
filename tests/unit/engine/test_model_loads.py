"""Models that several threads of a process load at the same time."""

import time
from concurrent.futures import ThreadPoolExecutor

from baton_serve.engine.model_folder import quiet_transformers


def test_one_thread_loads_at_a_time() -> None:
    inside = most = 0

    def load(_: int) -> None:
        nonlocal inside, most
        with quiet_transformers():
            inside += 1
            most = max(most, inside)
            time.sleep(0.001)
            inside -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(load, range(32)))
    assert most == 1
