"""Add-ons for mlxpaged: models in tar files, calls between <run> tags, a small API, and a command."""
