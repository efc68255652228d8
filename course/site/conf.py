"""Sphinx's settings of the site; `course/make_site.py` writes the sources. Nothing is fetched from elsewhere."""

project = "dlearn"
html_title = "dlearn: who sent what to whom"
extensions = ["myst_nb"]
nb_execution_mode = "off"  # the lessons are executed already, with their pictures and players
myst_heading_anchors = 3
myst_enable_extensions = ["html_image"]
nb_merge_streams = True
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
suppress_warnings = [
    "misc.highlighting_failure",  # JSON with dots for what is left out
    "myst.header",  # a lesson may begin its parts below a second heading
    "mystnb.unknown_mime_type",  # sliders: the picture beside them stays
]
