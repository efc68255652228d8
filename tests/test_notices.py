"""Notices to the user: where they go, and that each has a line of its own."""

import subprocess
import sys

import pytest

NOTICE, SHOWN = "from dlearn.notices import notice; notice('100%')", "dlearn: 100%\n"
OWN = "logging.getLogger('dlearn').addHandler(logging.FileHandler('/dev/stdout'))"
BAR = "import tqdm; bar = tqdm.tqdm(range(3), disable={}, bar_format='loss=1.3]')"
TEE = "sys.stderr = type('Tee', (), {'write': sys.stderr.write, 'flush': sys.stderr.flush})"


@pytest.mark.parametrize(
    ("program", "stderr", "stdout"),
    [
        (NOTICE, SHOWN, ""),
        (f"import os; os.environ['DLEARN_QUIET'] = '1'; logging.basicConfig(); {NOTICE}", "", ""),
        (f"{OWN}; {NOTICE}", "", "100%\n"),
        (f"{NOTICE}; {OWN}; notice('b')", SHOWN, "b\n"),
        # The root logger's: a console is written to once, and a file besides.
        (f"logging.basicConfig(); {NOTICE}", "WARNING:dlearn:100%\n", ""),
        (f"logging.basicConfig(filename='/dev/stdout'); {NOTICE}", SHOWN, "WARNING:dlearn:100%\n"),
        (f"import dlearn; logging.config.dictConfig({{'version': 1}}); {NOTICE}", SHOWN, ""),
        # A bar of progress may be this rank's, or, where this one shows none, another's.
        (f"{BAR.format(False)}; {NOTICE}", f"\nloss=1.3]\n{SHOWN}\nloss=1.3]\n", ""),
        (f"{BAR.format(True)}; logging.basicConfig(); {NOTICE}", "\nWARNING:dlearn:100%\n", ""),
        # A stderr that is closed, or none, or that can only be written to.
        (f"sys.stderr.close(); {NOTICE}", "", ""),
        (f"sys.stderr = None; {NOTICE}", "", ""),
        (f"{TEE}; {NOTICE}", SHOWN, ""),
    ],
)
def test_a_notice_goes_where_the_program_wants_it(program, stderr, stdout):
    command = [sys.executable, "-c", f"import logging.config, sys; {program}"]
    done = subprocess.run(command, text=True, capture_output=True, check=True)
    assert (done.stderr, done.stdout) == (stderr, stdout)
