"""What mpiexec starts in the place of a rank. It hands its seat in the MPI job on, and waits.

    python -I -S mpi_stub.py SOCKET

MPICH's mpiexec tells each process by its environment who it is, and gives it an open descriptor to talk through
(PMI_FD). Both go through SOCKET to the process that holds a real rank, which joins the job with them. The stub ends
with the status that it is then told: the rank's. If nobody is there any more to tell it, it ends with 1.
"""

import json
import os
import socket
import sys

GONE = b"1"


def main(path: str) -> None:
    seat = {name: value for name, value in os.environ.items() if name.startswith(("PMI", "MPI_"))}
    if "PMI_FD" not in seat:
        sys.exit("this mpiexec is not MPICH's (it gives no PMI_FD): pip install mpich")
    descriptor = int(seat.pop("PMI_FD"))
    holder = socket.socket(socket.AF_UNIX)
    holder.connect(path)
    socket.send_fds(holder, [json.dumps(seat).encode()], [descriptor])
    os.close(descriptor)
    try:
        status = holder.recv(16)
    except OSError:
        status = GONE
    os._exit(int(status or GONE))


if __name__ == "__main__":
    main(sys.argv[1])
