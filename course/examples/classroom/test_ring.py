"""Run by `pytest -p dlearn.course.pytest_plugin`: the student's ring.py has a function `ring`."""

from ring import ring


def test_ring(graded):
    graded("ring", ring)
