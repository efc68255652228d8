"""Settings for nbgrader: in this folder, `nbgrader validate source/ring/ring.ipynb`, and so on."""

c = get_config()  # noqa: F821 (nbgrader gives it)
c.CourseDirectory.course_id = "distributed"
c.CourseDirectory.ignore = [".ipynb_checkpoints", "__pycache__", ".dlearn", "dlearn-predictions.json"]
c.ExecutePreprocessor.timeout = 300  # for a cell; a submission that hangs is ended after 20 s for each number of ranks
