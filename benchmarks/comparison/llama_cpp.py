"""llama.cpp's own server, from the package xllamacpp, with its default settings: FILE.gguf PORT"""

from __future__ import annotations

import sys
import time

import xllamacpp  # type: ignore[import-not-found]


def main() -> None:
    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.port = sys.argv[1], int(sys.argv[2])
    server = xllamacpp.Server(parameters)  # it ends if this name is gone
    print(server.listening_address, flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
