"""Count the processes of a service that listen on a port. A process that is alive may not listen yet."""

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
