"""A real JupyterLab for tests: on the loopback interface, with a token, and with settings and files of its own."""

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

QUIET = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "apputils-extension/themes": {"adaptive-theme": True},  # dark where the browser asks for dark
    "docmanager-extension/plugin": {"autosave": False},
}


@dataclass(frozen=True)
class Lab:
    """A server that runs; `folder` holds its notebooks."""

    folder: Path
    address: str
    token: str

    def url(self, notebook: str) -> str:
        """Opens this notebook in a workspace of its own: loaded again, it shows no notebook of another page."""
        return f"{self.address}lab/workspaces/{Path(notebook).stem}/tree/{notebook}?token={self.token}&reset"

    def exported(self, notebook: str) -> Path:
        """A saved notebook as a page of its own, as `jupyter nbconvert --to html` makes it."""
        from nbconvert import HTMLExporter  # Here: it takes 2 s.

        page, _ = HTMLExporter().from_filename(str(self.folder / notebook))
        path = (self.folder / notebook).with_suffix(".html")
        path.write_text(page, encoding="utf-8")
        return path


@contextmanager
def running_lab(home: Path) -> Iterator[Lab]:
    """JupyterLab, until the block ends; then it and every kernel of it are gone."""
    folder = home / "notebooks"
    folder.mkdir()
    for name, settings in QUIET.items():
        file = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings))
    token = secrets.token_hex(16)
    options = {
        **{"ServerApp.ip": "127.0.0.1", "ServerApp.port": "0", "ServerApp.root_dir": str(folder)},
        **{"IdentityProvider.token": token, "ServerApp.open_browser": "False", "ServerApp.allow_root": "True"},
        **{"LabApp.extension_manager": "readonly", "LabApp.expose_app_in_browser": "True"},
    }
    places = {  # All of Jupyter's files are in `home`.
        **{"JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime"},
        **{"JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces", "IPYTHONDIR": "ipython"},
    }
    environment = os.environ | {name: str(home / place) for name, place in places.items()}
    log = home / "lab.log"
    with log.open("w") as output:
        command = [sys.executable, "-m", "jupyterlab", *(f"--{name}={value}" for name, value in options.items())]
        server = psutil.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield Lab(folder, _address(server, home, log), token)
    finally:
        own = [server, *server.children(recursive=True)]
        server.terminate()  # It ends its kernels, and they their ranks.
        _, left = psutil.wait_procs(own, timeout=10)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        assert left == [], "JupyterLab left processes behind"


def _address(server: psutil.Popen, home: Path, log: Path) -> str:
    """Where it listens: the server writes that into a file when it does."""
    file = home / "runtime" / f"jpserver-{server.pid}.json"
    until = time.monotonic() + 60
    while server.poll() is None and time.monotonic() < until:
        with suppress(FileNotFoundError, json.JSONDecodeError):
            return str(json.loads(file.read_text())["url"])
        time.sleep(0.05)
    raise AssertionError(f"JupyterLab has not started:\n{log.read_text()}")
