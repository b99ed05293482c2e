"""The HTTP side of the server: it reads requests, and writes text, errors and events. It never touches tensors."""

from mlxpaged.api.access.key_file import KeyFileError
from mlxpaged.api.app import create_app
from mlxpaged.api.batches import DataDirInUseError
from mlxpaged.api.config import HttpConfig
