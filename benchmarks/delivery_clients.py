"""The clients of delivery.py, a process of their own that imports nothing of the server. They ask until it is
killed, or an answer is an error."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

from comparison.client import Client

CLIENT_SECONDS = 600.0


def main(port: int, model: str, streams: int, tokens: int) -> None:
    client = Client(port, model, time.perf_counter() + CLIENT_SECONDS, CLIENT_SECONDS)

    def ask(i: int) -> str:
        while not (error := client.ask([{"role": "user", "content": f"Stream {i}"}], tokens).error):
            pass
        return error

    with ThreadPoolExecutor(streams) as threads:
        sys.exit(f"delivery_clients.py: {'; '.join({*threads.map(ask, range(streams))})}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
