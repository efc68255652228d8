"""What mpiexec starts in the place of a rank. It hands its seat in the MPI job on, and waits.

    python -I -S mpi_stub.py DESCRIPTOR NAME

MPICH's mpiexec tells each process by its environment who it is, and gives it an open descriptor to talk through
(PMI_FD). Both go through the socket DESCRIPTOR to the process that holds a real rank, which joins the job with them.
The stub ends with the status that it is then told: the rank's. If nobody is there any more to tell it, it ends with 1.
NAME is for those who look at the list of processes.
"""

import json
import os
import socket
import sys

GONE = b"1"


def main(door: int) -> None:
    seat = {name: value for name, value in os.environ.items() if name.startswith(("PMI", "MPI_"))}
    if "PMI_FD" not in seat:
        sys.exit("this mpiexec is not MPICH's (it gives no PMI_FD): pip install mpich")
    descriptor = int(seat.pop("PMI_FD"))
    holder, holders = socket.socketpair()
    with socket.socket(fileno=door) as way, holders:
        socket.send_fds(way, [json.dumps(seat).encode()], [descriptor, holders.fileno()])
    os.close(descriptor)
    try:
        status = holder.recv(16)
    except OSError:
        status = GONE
    os._exit(int(status or GONE))


if __name__ == "__main__":
    main(int(sys.argv[1]))
