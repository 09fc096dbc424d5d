"""`make demo` and `make up`: a local fleet of two instances, and the same request uncut and cut at three places.

Exit status 0: the answers are equal and each cut happened where it was asked for; 1: not so, or a process failed;
2: the machine lacks something.
"""

from __future__ import annotations

import argparse
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import openai
from rich.console import Console

from dynaserve import direct_http
from dynaserve.errors import ConfigError, DynaServeError
from dynaserve.local import checks
from dynaserve.local.answers import Answer, Record, check_cut, check_equal, describe_record
from dynaserve.local.fleet import LocalFleet, free_ports
from dynaserve.local.model import NAME, cache_dir, smollm2

INSTANCES = 2
PORT = 8000
ANSWER_TOKENS = 60
RECORD_TIMEOUT_S = 20.0
# Small prefill chunks, so that there is something to see of the KV cache that crosses while the prompt is computed.
SMALL_CHUNKS = ("--max-num-seqs", "16", "--max-num-batched-tokens", "64")
PROMPT = """\
For most of its history the lighthouse at Cape Meridian burned oil. Every evening at dusk the keeper climbed one hundred \
and ninety-nine steps, trimmed four wicks, wound the clockwork that turned the lens, and wrote the hour and the weather in \
a large green book. The lens was the pride of the coast: eight feet of cut glass, ground in Paris, shipped in sawdust, and \
put together on the tower by two men who had never seen the sea before. It gathered the small yellow flame into a single \
beam that a ship could see from twenty miles away. In fog the beam was useless, and so the keeper fired a small cannon once \
every ten minutes, sometimes for two days and two nights, sleeping in between as well as he could. When electricity came in \
1931 the wicks, the clockwork and the cannon went to a museum, but the lens stayed where it was. Nobody had found a better \
way to bend light. Today the tower is empty. A sensor switches the lamp on, a motor turns the glass, and a computer in a \
town forty miles inland would notice if either of them failed. The green books are still on their shelf. The last line in \
the last of them says: "Clear night, wind from the west, all well. The light will look after itself now."

Summarize this story in two sentences."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dynaserve.local.demo", description="Run a local fleet and stream one request uncut, then cut at three places."
    )
    parser.add_argument("--stay", action="store_true", help="only start the fleet, and keep it until Ctrl-C")
    parser.add_argument("--port", type=int, help=f"of the front-end (default: {PORT} with --stay, otherwise a free one)")
    args = parser.parse_args()
    console = Console(highlight=False)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        run(console, stay=args.stay, port=args.port)
    except (DynaServeError, openai.OpenAIError, httpx.HTTPError) as exc:
        console.print(f"demo: {exc}", markup=False, soft_wrap=True, style="red")
        raise SystemExit(2 if isinstance(exc, ConfigError) else 1) from exc
    except KeyboardInterrupt:
        console.print("\nStopped.")
        raise SystemExit(0 if args.stay else 130) from None


def run(console: Console, *, stay: bool, port: int | None) -> None:
    frontend_port = port or (PORT if stay else free_ports(1)[0])
    if misses := [*checks.fleet_misses(checks.inspect_machine(Path.cwd())), *checks.port_misses([frontend_port])]:
        raise ConfigError("\n      ".join(misses))
    model = smollm2()
    log_dir = cache_dir() / "logs"
    started = time.monotonic()
    console.print(
        f"Starting {INSTANCES} instances of one core each, and the front-end. It takes about a minute; the logs are in {log_dir}.",
        soft_wrap=True,
    )
    fleet = LocalFleet(
        model,
        instances=INSTANCES,
        vllm_args=("--served-model-name", NAME, *(() if stay else SMALL_CHUNKS)),
        log_dir=log_dir,
        ports=(*free_ports(INSTANCES), frontend_port),
    )
    try:
        with console.status("starting") as status:
            fleet.progress = status.update
            fleet.start()
        console.print(
            f"Ready after {time.monotonic() - started:.0f} s: {fleet.frontend_url} in front of {' and '.join(fleet.urls)}.", soft_wrap=True
        )
        if stay:
            wait(console, fleet)
        else:
            show_cuts(console, fleet)
    finally:
        fleet.stop()


def wait(console: Console, fleet: LocalFleet) -> None:
    """Returns never; raises FleetFailed if a process ends."""
    message = '"messages": [{"role": "user", "content": "Why is the sky blue?"}]'
    body = f'{{"model": "{NAME}", {message}, "vllm_xargs": {{"dynaserve_split": 40}}}}'
    console.print("Try, in another terminal:\n", style="bold")
    for line in (
        f"curl {fleet.frontend_url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
        f"curl {fleet.frontend_url}/dynaserve/requests/ID_OF_THE_ANSWER\n",
    ):
        console.print(line, markup=False, soft_wrap=True)
    console.print("Ctrl-C stops the fleet.")
    while True:
        time.sleep(1)
        fleet.check_alive()


def show_cuts(console: Console, fleet: LocalFleet) -> None:
    """Raises DynaServeError if an answer differs from the uncut one, or a cut did not happen as asked."""
    http = openai.DefaultHttpxClient(trust_env=False)  # loopback is not reached through a proxy
    client = openai.OpenAI(base_url=f"{fleet.frontend_url}/v1", api_key="none", http_client=http)
    uncut = ask(console, client, "Uncut", None)
    _show_record(console, fleet, uncut)
    prompt, end = uncut.prompt_tokens, uncut.prompt_tokens + uncut.output_tokens
    cuts = {"inside the prompt": prompt // 2, "at the end of the prompt": prompt, "inside the answer": (prompt + end) // 2}
    for where, split_token in cuts.items():
        answer = ask(console, client, f"Cut {where}, at token {split_token} of {end}", split_token)
        check_cut(answer, _show_record(console, fleet, answer))
        check_equal(uncut, answer)
    console.print(f"\nAll {len(cuts) + 1} answers are equal: {uncut.output_tokens} tokens each.", style="bold green")


def ask(console: Console, client: openai.OpenAI, title: str, split_token: int | None) -> Answer:
    """Streams one answer to the console."""
    console.rule(title)
    messages: Any = [{"role": "user", "content": PROMPT}]
    extra: dict[str, Any] = {"cache_salt": title}  # otherwise the prefix cache of an earlier run saves the work that is to be shown
    if split_token is not None:
        extra["vllm_xargs"] = {"dynaserve_split": split_token}
    stream = client.chat.completions.create(
        model=NAME,
        messages=messages,
        temperature=0,
        max_tokens=ANSWER_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=extra,
    )
    answer = Answer(split_token)
    for chunk in stream:
        console.print(answer.add(chunk), end="", markup=False, soft_wrap=True, style="cyan")
    console.print()
    return answer


def _show_record(console: Console, fleet: LocalFleet, answer: Answer) -> Record:
    record = fetch_record(fleet.frontend_url, answer.request_id)
    for line in describe_record(record, fleet.urls):
        console.print(f"  {line}", markup=False, soft_wrap=True)
    return record


def fetch_record(frontend_url: str, request_id: str) -> Record:
    """The record, once the instances have told what they computed: that comes shortly after the answer's end."""
    deadline = time.monotonic() + RECORD_TIMEOUT_S
    while True:
        answer = direct_http.get(f"{frontend_url}/dynaserve/requests/{request_id}", timeout_s=5.0)
        (record,) = answer.raise_for_status().json()["sequences"]
        if _is_complete(record):
            return dict(record)
        if time.monotonic() > deadline:
            raise DynaServeError(f"the record of {request_id} is not complete after {RECORD_TIMEOUT_S:.0f} s: {record}")
        time.sleep(0.05)


def _is_complete(record: Record) -> bool:
    return all(record[side] is None or record[side]["computed_tokens"] is not None for side in ("alpha", "beta"))


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
