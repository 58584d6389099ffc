"""Which processes of a service listen: one that lives need not do so yet."""

import psutil


def num_listening(process: psutil.Process, port: int) -> int:
    """Of this process and all that it started, how many listen on this TCP port themselves."""
    return sum(_listens(one, port) for one in [process, *process.children(recursive=True)])


def _listens(process: psutil.Process, port: int) -> bool:
    try:
        connections = process.net_connections("tcp")
    except psutil.NoSuchProcess:
        return False
    return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in connections)
