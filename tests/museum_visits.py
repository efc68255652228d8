"""What must hold of every exhibit of the museum of hangs: one sentence, live, in the run's error, from the files."""

from dlearn.lessons.museum import Visit


def check_visit(seen: Visit) -> None:
    shown = seen.exhibit
    assert shown.is_told_by(seen.sentence), seen.files
    if shown.ends != "wrong":
        assert seen.sentence in seen.error
    if seen.hung:
        assert seen.sentence in seen.live, "the same, while it hung"
    else:
        assert shown.ends != "hangs" or "SIGABRT" in seen.error
        assert seen.live == ()
