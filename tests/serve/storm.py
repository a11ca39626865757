"""A storm of requests against a real server: good ones, broken ones, and clients that hang up.

    python -m tests.serve.storm --model DIRECTORY [--requests 600]

starts a server, storms it, sends it SIGTERM in the middle of the next storm, and prints what became
of the requests and of the memory. Good requests are greedy, and each is asked once before, alone:
what it gets in the storm must be that, to the letter. Broken ones must get an answer of status 400
to 499. The client is a socket, since no HTTP library sends what a broken client sends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.serve.server import GRACE_SECONDS, Server, serve

CONCURRENCY = 32
ANSWER_SECONDS = 300

# MAX 26.7's own: it answers these with status 500 before we see them (docs/robustness.md).
FAULTS = ("nested", "no tokens")

WORDS = ("the", "of", "and", "to", "in", "is", "was", "for", "on", "that", "with", "as", "his")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request.

    Attributes:
        kind: what it is an example of.
        path: below `/v1/`.
        body: what is sent.
        hang_up: after so many bytes of the answer the client is gone; None if it stays.
        truncated: the client sends half of the body and is gone.
    """

    kind: str
    path: str
    body: bytes
    hang_up: int | None = None
    truncated: bool = False

    @property
    def is_good(self) -> bool:
        """Whether an answer of status 200 is due."""
        return self.kind in ("plain", "streamed", "chat", "chat streamed")


@dataclass
class Tally:
    """What became of requests.

    Attributes:
        sent: how many of each kind.
        right: good ones with the text that they get alone.
        refused: broken ones with a clean error.
        left: those whose client hung up.
        wrong: everything else that was answered, in words.
        lost: those without an answer, in words.
    """

    sent: Counter[str] = field(default_factory=Counter)
    right: int = 0
    refused: int = 0
    left: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    @property
    def answered(self) -> int:
        """Those that got an answer of any sort."""
        return self.right + self.refused + len(self.wrong)


def good_request(model: str, seed: random.Random, brief: bool) -> Request:
    """A greedy completion or chat, streamed or not, of a few words or of many."""
    count = seed.choice((1, 3, 8) if brief else (1, 3, 8, 20, 60))
    prompt = " ".join(seed.choice(WORDS) for _ in range(count))
    kind = seed.choice(("plain", "streamed", "chat", "chat streamed"))
    content: dict[str, Any] = {
        "model": model,
        "max_tokens": seed.randint(1, 4 if brief else 12),
        "temperature": 0,
        "stream": kind.endswith("streamed"),
    }
    if kind.startswith("chat"):
        content["messages"] = [{"role": "user", "content": prompt}]
        return Request(kind=kind, path="chat/completions", body=json.dumps(content).encode())
    body = json.dumps(content | {"prompt": prompt}).encode()
    return Request(kind=kind, path="completions", body=body)


def broken_requests(model: str, max_length: int) -> list[Request]:
    """One of every sort that must be refused."""
    good = {"model": model, "prompt": "the", "max_tokens": 4, "temperature": 0}
    chat = {"model": model, "messages": [{"role": "user", "content": "the"}], "max_tokens": 4}
    contents: dict[str, bytes] = {
        "cut JSON": json.dumps(good).encode()[:-9],
        "no JSON": b"prompt=the",
        "nothing": b"",
        "a list": b"[]",
        "nested": b"[" * 100_000,
        "no tokens": json.dumps(good | {"prompt": []}).encode(),
        "unknown token": json.dumps(good | {"prompt": [10**9]}).encode(),
        "negative token": json.dumps(good | {"prompt": [-1]}).encode(),
        "echo beside logprobs": json.dumps(good | {"echo": True, "logprobs": 5}).encode(),
        "top_k": json.dumps(good | {"top_k": 2**31, "temperature": 1}).encode(),
        "invalid UTF-8": json.dumps(good).encode().replace(b"the", b"\xff\xfe"),
        "unknown model": json.dumps(good | {"model": "somebody/else"}).encode(),
        "no model": json.dumps({"prompt": "the"}).encode(),
        "no prompt": json.dumps({"model": model}).encode(),
        "over-long": json.dumps(good | {"prompt": "the " * (2 * max_length)}).encode(),
        "over-long tokens": json.dumps(good | {"prompt": [5] * (max_length + 1)}).encode(),
    }
    for name, value in (
        ("prompt", 3),
        ("prompt", {}),
        ("prompt", None),
        ("max_tokens", "many"),
        ("max_tokens", -1),
        ("max_tokens", 10**30),
        ("temperature", "hot"),
        ("temperature", -1),
        ("top_p", 7),
        ("top_p", float("nan")),
        ("seed", 2**64),
        ("stream", "perhaps"),
    ):
        contents[f"{name} {str(value)[:9]}"] = json.dumps(good | {name: value}).encode()
    requests = [
        Request(kind=kind, path="completions", body=body) for kind, body in contents.items()
    ]
    for messages in (3, {}, [], [3], [{"role": 3}], [{"content": "the"}]):
        body = json.dumps(chat | {"messages": messages}).encode()
        requests.append(Request(kind=f"messages {messages}", path="chat/completions", body=body))
    requests.append(Request(kind="unknown path", path="nothing", body=b"{}"))
    return requests


def leaving_request(model: str, seed: random.Random, brief: bool) -> Request:
    """A client that hangs up: in the request, before the answer, or in the middle of a stream."""
    content = {"model": model, "prompt": "the of", "temperature": 0, "stream": True}
    body = json.dumps(content | {"max_tokens": 20 if brief else 200}).encode()
    after = seed.choice((None, 0, 1, 400, 2000))
    return Request(
        kind="hang-up", path="completions", body=body, hang_up=after or 0, truncated=after is None
    )


def storm_of(
    model: str, max_length: int, count: int, *, good: int = 24, brief: bool = False
) -> list[Request]:
    """`count` requests: each broken one, some that hang up, and any of `good` others.

    What is `brief` has fewer tokens, for larger models.
    """
    seed = random.Random(1)
    pool = [good_request(model, seed, brief) for _ in range(good)]
    requests = broken_requests(model, max_length)
    while len(requests) < count:
        requests.append(
            leaving_request(model, seed, brief) if seed.random() < 0.125 else seed.choice(pool)
        )
    seed.shuffle(requests)
    return requests


async def send(url: str, request: Request) -> tuple[int, bytes] | None:
    """Sends a request; the status and the body of the answer, or None if the client hung up.

    Raises:
        OSError: the connection broke before the answer was whole.
    """
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        head = (
            f"POST {parts.path}/{request.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(request.body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        body = request.body[: len(request.body) // 2] if request.truncated else request.body
        writer.write(head.encode() + body)
        await writer.drain()
        if request.truncated:
            return None
        if request.hang_up is not None:
            await reader.read(request.hang_up) if request.hang_up else None
            return None
        answer = await reader.read()
    finally:
        writer.transport.abort()
    match = re.match(rb"HTTP/1\.1 (\d+)[^\r]*\r\n(.*?)\r\n\r\n(.*)", answer, re.DOTALL)
    if match is None:
        raise ConnectionError(f"the connection ended after {answer[:80]!r}")
    return int(match[1]), _content(match[2], match[3])


def _content(head: bytes, body: bytes) -> bytes:
    """An answer's body, put together; it must be whole."""
    if b"chunked" not in head.lower():
        length = re.search(rb"(?i)content-length: (\d+)", head)
        if length is not None and int(length[1]) != len(body):
            raise ConnectionError(f"{len(body)} bytes of {int(length[1])} came")
        return body
    whole = b""
    while (parts := body.split(b"\r\n", 1))[0] not in (b"0", b""):
        size = int(parts[0], 16)
        whole, body = whole + parts[1][:size], parts[1][size + 2 :]
    if not body.startswith(b"0\r\n"):
        raise ConnectionError(f"a stream ended without its end, after {whole[-80:]!r}")
    return whole


def text_of(request: Request, body: bytes) -> str:
    """The text of a good answer.

    Raises:
        ValueError: it is not what the API promises.
    """
    try:
        if not request.kind.endswith("streamed"):
            choice = json.loads(body)["choices"][0]
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            return str(text)
        text, ended = "", False
        for line in body.decode().splitlines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                for choice in json.loads(line[6:])["choices"]:
                    text += (
                        (choice["delta"]["content"] or "") if "delta" in choice else choice["text"]
                    )
        if not ended:
            raise ValueError("no [DONE]")
        return text
    except (KeyError, IndexError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


async def _one(url: str, request: Request, expected: Mapping[bytes, str], tally: Tally) -> None:
    tally.sent[request.kind] += 1
    try:
        answer = await asyncio.wait_for(send(url, request), ANSWER_SECONDS)
    except (OSError, asyncio.TimeoutError) as error:
        tally.lost.append(f"{request.kind}: {type(error).__name__}: {error}")
        return
    if answer is None:
        tally.left += 1
        return
    status, body = answer
    if not request.is_good:
        if 400 <= status < 500 or (request.kind in FAULTS and status == 500):
            tally.refused += 1
        else:
            tally.wrong.append(f"{request.kind}: status {status}: {body[:200]!r}")
        return
    try:
        if status != 200:
            raise ValueError(f"status {status}: {body[:200]!r}")
        if (text := text_of(request, body)) != expected[request.body]:
            raise ValueError(f"{text!r} is not {expected[request.body]!r}")
        tally.right += 1
    except ValueError as error:
        tally.wrong.append(f"{request.kind}: {error}")


async def references(url: str, requests: Sequence[Request]) -> dict[bytes, str]:
    """What each good request gets when it is alone."""
    expected = {}
    for request in requests:
        if request.is_good and request.body not in expected:
            answer = await send(url, request)
            assert answer is not None and answer[0] == 200, answer
            expected[request.body] = text_of(request, answer[1])
    return expected


async def storm(url: str, requests: Sequence[Request], expected: Mapping[bytes, str]) -> Tally:
    """Sends all of them, `CONCURRENCY` at once."""
    tally, waiting = Tally(), asyncio.Semaphore(CONCURRENCY)

    async def one(request: Request) -> None:
        async with waiting:
            await _one(url, request, expected, tally)

    await asyncio.gather(*map(one, requests))
    return tally


def memory(server: Server) -> int:
    """Bytes of anonymous memory that the server's processes hold."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            fields = (status.parent / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == server.process.pid:  # the server leads its process group
                found = re.search(r"RssAnon:\s+(\d+) kB", status.read_text())
                total += 1024 * int(found[1]) if found else 0
    return total


async def terminate(
    server: Server, requests: Sequence[Request], expected: Mapping[bytes, str]
) -> tuple[Tally, float]:
    """SIGTERM in the middle of a storm; what became of its requests, and seconds until the end."""
    running = asyncio.create_task(storm(server.url, requests, expected))
    await asyncio.sleep(1)
    started = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(server.process.wait, GRACE_SECONDS)
    seconds = time.monotonic() - started
    return await asyncio.wait_for(running, GRACE_SECONDS), seconds


def main() -> None:
    """Storms a server, and prints what came of it; exit status 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a checkpoint's directory")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--max-length", type=int, default=2048)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "server.log"
        arguments = ["--model", options.model, "--max-length", str(options.max_length)]
        arguments += ["--max-batch-size", str(CONCURRENCY), "--served-model-name", "storm"]
        with serve(log, *arguments) as server:
            requests = storm_of("storm", options.max_length, options.requests)
            expected = asyncio.run(references(server.url, requests))
            asyncio.run(storm(server.url, requests, expected))
            before = memory(server)
            started = time.monotonic()
            tally = asyncio.run(storm(server.url, requests, expected))
            seconds, after = time.monotonic() - started, memory(server)
            alive = server.process.poll() is None
            last, grace = asyncio.run(terminate(server, requests, expected))
        print(f"{len(requests)} requests, {CONCURRENCY} at once, in {seconds:.0f} s")
        print(
            f"sent {tally.sent.total()}, answered {tally.answered} (right {tally.right}, refused "
            f"{tally.refused}), hung up {tally.left}, wrong {len(tally.wrong)}, lost "
            f"{len(tally.lost)}"
        )
        print(f"memory after the first storm {before / 1e6:.0f} MB, then {after / 1e6:.0f} MB")
        refused = sum("ConnectionRefusedError" in line for line in last.lost)
        print(
            f"SIGTERM in a storm: ended in {grace:.1f} s; answered {last.answered}, of them wrong "
            f"{len(last.wrong)}; cut off {len(last.lost) - refused}, came too late {refused}"
        )
        for line, count in Counter(tally.wrong + tally.lost + last.wrong).most_common(40):
            print(f"  {count}x {line}")
        raise SystemExit(not alive or bool(tally.wrong or tally.lost or last.wrong))


if __name__ == "__main__":
    main()
