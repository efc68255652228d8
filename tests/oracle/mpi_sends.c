/* What a program asks of MPI: each message that it sends, one line "src dst tag bytes", ranks of MPI_COMM_WORLD.

   mpicc -shared -fPIC mpi_sends.c -o mpi_sends.so
   mpiexec -n 2 env LD_PRELOAD=./mpi_sends.so MPI_SENDS=folder python -m mpi4py program.py

   MPI lets a tool define its functions anew and call the real ones as PMPI_...: so this is below mpi4py, and counts
   exactly. mpi4py calls the forms with large counts (MPI_Send_c); both are here. What MPI sends inside a collective
   does not pass here. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static FILE *out;

static int in_world(MPI_Comm comm, int rank) {
  MPI_Group group, world;
  int found = rank;
  PMPI_Comm_group(comm, &group);
  PMPI_Comm_group(MPI_COMM_WORLD, &world);
  PMPI_Group_translate_ranks(group, 1, &rank, world, &found);
  PMPI_Group_free(&group);
  PMPI_Group_free(&world);
  return found;
}

static void note(MPI_Count count, MPI_Datatype type, int dest, int tag, MPI_Comm comm) {
  int me, size;
  if (dest == MPI_PROC_NULL) return;
  PMPI_Comm_rank(MPI_COMM_WORLD, &me);
  PMPI_Type_size(type, &size);
  if (!out) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%d.txt", getenv("MPI_SENDS"), me);
    out = fopen(path, "w");
  }
  fprintf(out, "%d %d %d %lld\n", me, in_world(comm, dest), tag, (long long)count * size);
  fflush(out);
}

#define SEND(NAME, COUNT)                                                                                     \
  int MPI_##NAME(const void *buf, COUNT count, MPI_Datatype type, int dest, int tag, MPI_Comm comm) {         \
    note(count, type, dest, tag, comm);                                                                       \
    return PMPI_##NAME(buf, count, type, dest, tag, comm);                                                    \
  }
#define ISEND(NAME, COUNT)                                                                                    \
  int MPI_##NAME(const void *buf, COUNT count, MPI_Datatype type, int dest, int tag, MPI_Comm comm,           \
                 MPI_Request *request) {                                                                      \
    note(count, type, dest, tag, comm);                                                                       \
    return PMPI_##NAME(buf, count, type, dest, tag, comm, request);                                           \
  }
#define SENDRECV(NAME, COUNT)                                                                                 \
  int MPI_##NAME(const void *buf, COUNT count, MPI_Datatype type, int dest, int tag, void *into, COUNT room,  \
                 MPI_Datatype its, int source, int its_tag, MPI_Comm comm, MPI_Status *status) {              \
    note(count, type, dest, tag, comm);                                                                       \
    return PMPI_##NAME(buf, count, type, dest, tag, into, room, its, source, its_tag, comm, status);          \
  }
#define REPLACE(NAME, COUNT)                                                                                  \
  int MPI_##NAME(void *buf, COUNT count, MPI_Datatype type, int dest, int tag, int source, int its_tag,       \
                 MPI_Comm comm, MPI_Status *status) {                                                         \
    note(count, type, dest, tag, comm);                                                                       \
    return PMPI_##NAME(buf, count, type, dest, tag, source, its_tag, comm, status);                           \
  }
#define BOTH(FORM, NAME) FORM(NAME, int) FORM(NAME##_c, MPI_Count)

BOTH(SEND, Send)
BOTH(SEND, Bsend)
BOTH(SEND, Ssend)
BOTH(SEND, Rsend)
BOTH(ISEND, Isend)
BOTH(ISEND, Ibsend)
BOTH(ISEND, Issend)
BOTH(ISEND, Irsend)
BOTH(SENDRECV, Sendrecv)
BOTH(REPLACE, Sendrecv_replace)
