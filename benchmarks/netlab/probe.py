"""What runs in the sites while the test internet is checked: it sends, takes, echoes and floods.

python probe.py sink ADDRESS PORT                       take what comes over TCP, and say to each sender how fast it came
python probe.py echo ADDRESS PORT                       send datagrams back
python probe.py send ADDRESS PORT SECONDS CONGESTION N  send over N connections; prints bytes/s that arrived in the second half
python probe.py ping ADDRESS PORT COUNT                 prints the median round trip of COUNT datagrams, in seconds
python probe.py flood ADDRESS PORT SECONDS [MBIT]       send datagrams of 1,400 bytes, at 50 Mbit/s when nothing is said
"""

from __future__ import annotations

import socket
import statistics
import sys
import threading
import time

PIECE = bytes(1 << 16)


def sink(address: str, port: int) -> None:
    """Answers each sender with the bytes/s of the second half of what it sent, by time."""
    with socket.create_server((address, port), backlog=64) as listening:
        print("ready", flush=True)
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=_take, args=(connection,), daemon=True).start()


def _take(connection: socket.socket) -> None:
    came: list[tuple[float, int]] = []
    began, total = time.monotonic(), 0
    while piece := connection.recv(1 << 20):
        total += len(piece)
        came.append((time.monotonic() - began, total))
    last = came[-1][0]
    half = next(i for i, (at, _) in enumerate(came) if at >= last / 2)
    rate = (total - came[half][1]) / max(1e-9, last - came[half][0])
    connection.sendall(f"{rate}\n".encode())
    connection.close()


def echo(address: str, port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        made.bind((address, port))
        print("ready", flush=True)
        while True:
            data, sender = made.recvfrom(2000)
            made.sendto(data, sender)


def send(address: str, port: int, seconds: float, congestion: str, streams: int) -> None:
    rates: list[float] = []

    def one() -> None:
        with socket.create_connection((address, port)) as made:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                made.sendall(PIECE)
            made.shutdown(socket.SHUT_WR)
            rates.append(float(made.makefile().readline()))

    threads = [threading.Thread(target=one) for _ in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(sum(rates))


def ping(address: str, port: int, count: int) -> None:
    trips = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        made.connect((address, port))
        made.settimeout(2.0)
        for number in range(count):
            began = time.monotonic()
            made.send(number.to_bytes(4, "big"))
            try:
                while int.from_bytes(made.recv(2000), "big") != number:
                    pass
            except TimeoutError:
                continue
            trips.append(time.monotonic() - began)
            time.sleep(0.01)
    print(statistics.median(trips))


def flood(address: str, port: int, seconds: float, mbit: float = 50.0) -> None:
    began, sent, body = time.monotonic(), 0, bytes(1400)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        while (passed := time.monotonic() - began) < seconds:
            while sent < passed * mbit * 125e3:
                made.sendto(body, (address, port))
                sent += 1428
            time.sleep(0.002)


def main(words: list[str]) -> None:
    kind, address, port, *more = words
    match kind:
        case "sink":
            sink(address, int(port))
        case "echo":
            echo(address, int(port))
        case "send":
            send(address, int(port), float(more[0]), more[1], int(more[2]))
        case "ping":
            ping(address, int(port), int(more[0]))
        case "flood":
            flood(address, int(port), *map(float, more))


if __name__ == "__main__":
    main(sys.argv[1:])
