"""What the tests of the recorder of mpi4py let ranks do: each form of each call, for two ranks or more.

mpiexec -n 2 python -m mpi4py mpi_programs.py [FOLDER]      points, collectives and waits, recorded into FOLDER if given
"""

import random
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
    turned = comm.Dup().Split(0, -comm.rank)  # The same ranks by other numbers.
    turned.send("turned", (turned.rank + 1) % turned.size, 40)
    assert turned.recv(source=(turned.rank - 1) % turned.size, tag=40) == "turned"
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


def waits() -> None:
    """Each way to wait, for a send to the right and a receive from the left; and a receive that is taken back."""
    from mpi4py import MPI

    comm, request = MPI.COMM_WORLD, MPI.Request
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for wait in (request.Waitall, request.Waitsome, request.waitany, request.testsome, wait_one_by_one):
        requests = [comm.isend("x", right), comm.irecv(source=left)]
        while any(requests):
            wait(requests)
    never = comm.irecv(source=left, tag=99)
    never.Cancel()
    never.Wait()


def wait_one_by_one(requests: list) -> None:
    for request in requests:
        while not request.test()[0]:
            pass


def at_random() -> list[tuple[int, int]]:
    """Who sends whom what by chance, asked for by all sorts of wildcards; the number of each message at its sender."""
    from mpi4py import MPI

    comm, status, choose = MPI.COMM_WORLD, MPI.Status(), random.Random(1)
    plan = [(choose.randrange(comm.size), choose.randrange(comm.size), choose.randrange(3)) for _ in range(60)]
    mine = [(dst, tag) for src, dst, tag in plan if src == comm.rank]
    coming = sum(dst == comm.rank for _, dst, _ in plan)
    wild = [comm.irecv() for _ in range(coming // 3)]
    sending = [comm.isend((comm.rank, number), dst, tag) for number, (dst, tag) in enumerate(mine)]
    got = []
    for _ in range(coming - len(wild)):
        comm.probe(status=status)  # So that there is one that each of these four asks for.
        source = choose.choice([MPI.ANY_SOURCE, status.Get_source()])
        got.append(comm.recv(source=source, tag=choose.choice([MPI.ANY_TAG, status.Get_tag()])))
    MPI.Request.waitall(sending)
    return [*(request.wait() for request in wild), *got]


def everything() -> None:
    points()
    collectives()
    waits()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        everything()
    else:
        import dlearn

        with dlearn.record(sys.argv[1]):
            everything()
