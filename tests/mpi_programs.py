"""What the tests of the recorder of mpi4py let ranks do: each form of each call, for two ranks or more.

mpiexec -n 2 python -m mpi4py mpi_programs.py [FOLDER]      points and collectives, recorded into FOLDER if given
"""

from __future__ import annotations

import sys

import numpy as np

# Nothing of MPI is taken from its module here, before a recording begins: programs ask for it.


def points() -> None:
    """Each form of send and receive; `left` and `right` are the same rank where there are two."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    room = np.zeros(4, "i")
    comm.Attach_buffer(MPI.Alloc_mem(1 << 16)) if hasattr(comm, "Attach_buffer") else None
    for tag, send in enumerate([comm.isend, comm.issend, comm.ibsend]):
        request = send({"from": comm.rank}, right, tag)
        assert comm.recv(source=left, tag=tag) == {"from": left}
        request.wait()
    for tag, post in enumerate([comm.Isend, comm.Issend, comm.Ibsend], 10):
        request = post(np.full(4, comm.rank, "i"), dest=right, tag=tag)
        comm.Recv([room, MPI.INT], source=left, tag=tag)
        request.Wait()
        assert room[0] == left
    if comm.rank == 0:
        for tag, (send, post) in enumerate(
            zip((comm.send, comm.ssend, comm.bsend), (comm.Send, comm.Ssend, comm.Bsend), strict=True), 20
        ):
            send("object", 1, tag=tag)
            post([np.arange(4, dtype="d"), 3, MPI.DOUBLE], 1, tag)
        comm.Rsend(np.zeros(2), dest=1, tag=comm.recv(source=1))
    if comm.rank == 1:
        for tag in (20, 21, 22):
            assert comm.recv(source=0, tag=tag) == "object"
            comm.Recv(np.zeros(8), source=0, tag=tag)
        ready = comm.Irecv(np.zeros(2), source=0, tag=23)
        comm.send(23, dest=0)
        ready.Wait()
    assert comm.sendrecv("swap", right, 30, source=left, recvtag=30) == "swap"
    comm.Sendrecv(np.full(4, 7, "i"), right, 31, recvbuf=room, source=left, recvtag=31)
    comm.Sendrecv_replace(room, right, 32, source=left, recvtag=32)
    comm.Send(room, MPI.PROC_NULL)
    comm.Recv(room, MPI.PROC_NULL)
    assert room.tolist() == [7] * 4
    lasting = [comm.Send_init(room, right, 33), comm.Recv_init(np.zeros(4, "i"), left, 33)]
    for _ in range(2):
        MPI.Prequest.Startall(lasting)
        MPI.Request.Waitall(lasting)
    for each in lasting:
        each.Free()
    if hasattr(comm, "Detach_buffer"):
        comm.Detach_buffer()


def collectives() -> None:
    """Each collective, over objects and over buffers of four doubles for each rank; the sums of objects last."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    n, mine, whole = comm.size, np.full(4, comm.rank + 1.0), np.zeros(4 * comm.size)
    comm.barrier()
    assert comm.bcast([1, 2, 3] if comm.rank == 0 else None) == [1, 2, 3]
    assert comm.scatter(list(range(n)) if comm.rank == 0 else None) == comm.rank
    assert comm.allgather(comm.rank) == list(range(n))
    assert comm.alltoall([comm.rank] * n) == list(range(n))
    comm.gather("x" * comm.rank, root=1)
    comm.Bcast(mine, root=1)
    comm.Gather(mine, whole if comm.rank == 0 else None)
    comm.Scatter(whole if comm.rank == 0 else None, mine)
    comm.Allgather(mine, [whole, 4, MPI.DOUBLE])
    comm.Allgatherv(mine[: comm.rank + 1], [whole, [rank + 1 for rank in range(n)], None, MPI.DOUBLE])
    comm.Alltoall(whole.copy(), whole)
    comm.Reduce(mine, whole[:4] if comm.rank == 0 else None, op=MPI.MAX)
    comm.Allreduce(MPI.IN_PLACE, mine)
    comm.Reduce_scatter_block(whole, mine)
    comm.Scan(mine, mine.copy())
    comm.Iallreduce(mine.copy(), mine).Wait()
    request = comm.Ibarrier()
    while not request.Test():
        pass


def main(folder: str | None) -> None:
    def both() -> None:
        points()
        collectives()

    if folder is None:
        return both()
    import dlearn

    with dlearn.record(folder):
        both()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
