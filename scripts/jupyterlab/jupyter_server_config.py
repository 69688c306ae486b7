"""Give JupyterLab the style sheet in custom/, unless the reader has another one."""

from pathlib import Path

from jupyter_core.paths import jupyter_config_dir
from jupyter_server.base.handlers import AuthenticatedFileHandler

THEORY = Path(__file__).resolve().parents[2] / "theory"


class FilesAndTheory(AuthenticatedFileHandler):
    """Serves files of the student's folder, and those that its link to the theory leads to.

    Since version 6.6 tornado follows no link out of the folder, so pages would lack their figures.
    """

    def validate_absolute_path(self, root: str, absolute_path: str) -> str:  # noqa: D102
        target = Path(absolute_path).resolve()
        if target.is_relative_to(THEORY) and target.is_file():
            return str(target)
        return super().validate_absolute_path(root, absolute_path)


c = get_config()  # noqa: F821  # type: ignore[unknown-name]
c.LabApp.custom_css = True
c.LabApp.log_level = "WARN"  # --log-level is the server's
c.ContentsManager.files_handler_class = FilesAndTheory
styles = Path(jupyter_config_dir(), "custom"), Path(__file__).with_name("custom")
c.ServerApp.tornado_settings.update({"static_custom_path": [str(folder) for folder in styles]})
