"""Find the processes that listen on a port. A process that is alive may not listen yet."""

import psutil


def num_listening(process: psutil.Process, port: int) -> int:
    """Return how many of this process and its descendants listen on a TCP port."""
    return sum(_listens(one, port) for one in [process, *process.children(recursive=True)])


def _listens(process: psutil.Process, port: int) -> bool:
    try:
        connections = process.net_connections("tcp")
    except psutil.NoSuchProcess:
        return False
    return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in connections)


def listening_process(port: int) -> psutil.Process:
    """Return the process of this user that listens on a TCP port. Raises `LookupError` without one."""
    for process in psutil.process_iter():
        try:
            if _listens(process, port):
                return process
        except psutil.AccessDenied:  # a process of another user
            continue
    raise LookupError(f"no process listens on port {port}")
