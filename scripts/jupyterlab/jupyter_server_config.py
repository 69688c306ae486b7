"""Gives JupyterLab the style sheet in custom/, unless the reader has one of their own."""

from pathlib import Path

from jupyter_core.paths import jupyter_config_dir

c = get_config()  # noqa: F821  # type: ignore[unknown-name]
c.LabApp.custom_css = True
c.LabApp.log_level = "WARN"  # --log-level is the server's
styles = Path(jupyter_config_dir(), "custom"), Path(__file__).with_name("custom")
c.ServerApp.tornado_settings.update({"static_custom_path": [str(folder) for folder in styles]})
