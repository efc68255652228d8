"""Exercise `five_hangs`: answers that are right for the student with an empty name, and wrong ones."""

ONE = [(2, 0, "all_reduce"), (0, 1, "recv"), (1, 0, "recv"), (0, 1, "send"), (1, 2, "send")]
ANOTHER = [(1, 0, "all_reduce"), (0, 1, "recv"), (0, 1, "send"), (2, 0, "all_reduce"), (0, 1, "send")]


def but(number, answer):
    """The right answers, less one of them."""
    return [answer if at == number else each for at, each in enumerate(ONE, start=1)]


RIGHT = (ONE, ANOTHER)
WRONG = (
    (but(1, (0, 1, "all_reduce")), "job 1: rank 0 does not wait"),
    (but(2, (0, 1, "send")), "job 2: rank 0 does not wait in send"),
    (but(3, (0, 2, "send")), "job 3: rank 0 waits in send, and not for rank 2"),
    (but(4, (1, 2, "all_reduce")), "job 4: rank 1 waits in all_reduce, and not for rank 2"),
    (but(5, (0, 2, "send")), "job 5: rank 0 waits in send, and not for rank 2"),
    (ONE[:4], "there are not five answers"),
    (but(2, None), "job 2 has no answer yet"),
    (but(5, "rank 0"), "job 5: 'rank 0' is not (rank, for which rank, call)"),
)
