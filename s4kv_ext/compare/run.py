"""Measure every piece that is not there yet."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from tqdm import tqdm

from s4kv_ext.compare import capacity, conditions, fill, lm_eval, plan, quality, speed
from s4kv_ext.compare.client import Gone
from s4kv_ext.compare.scrape import PREFIX_HITS
from s4kv_ext.compare.servers import Died, Running, Server, Started
from s4kv_ext.compare.sides import Side
from s4kv_ext.compare.store import Piece, Store, write
from s4kv_ext.compare.tasks import Task

WARM_TOKENS = 8


def say(text: str) -> None:
    tqdm.write(f"s4kv: {text}", file=sys.stderr)


@dataclass
class Run:
    args: argparse.Namespace
    sides: list[Side]
    tasks: list[Task]
    store: Store
    servers: dict[str, Server] = field(default_factory=dict)
    failures: list[dict[str, str]] = field(default_factory=list)
    never: set[str] = field(default_factory=set)  # sides whose server does not start

    def measure(self) -> None:
        names = list(plan.groups(self.tasks))
        turns = [
            (side, turn, list(plan.pieces(side, turn, self.args, names)))
            for side, turn in plan.order(self.sides, self.args.rounds)
        ]
        missing = [sum(not self.store.has(p) for p in ps) for _, _, ps in turns]
        try:
            with tqdm(total=sum(missing), unit="piece", disable=None) as bar:
                if self.args.together and sum(missing):
                    self.start_all()
                if sum(missing) and (self.args.together or self.sides[0].url):
                    self.check_all()
                for (side, turn, ps), left in zip(turns, missing):
                    if left and side.name not in self.never:
                        self.turn(side, turn, ps, bar)
        finally:
            self.stop(self.sides)

    def check_all(self) -> None:
        """Where all servers are up, refuse unequal ones before anything is measured."""
        known: tuple[str, dict[str, Any]] | None = None
        for side in self.sides:
            if side.name in self.never:
                continue
            with suppress(Died, Gone):  # which is reported in the side's turn
                facts = conditions.read(self.server(side).client)
                known = known or (side.name, facts)
                conditions.require_equal((known[0], side.name), known[1], facts)

    def turn(self, side: Side, turn: int, pieces: Sequence[Piece], bar: tqdm) -> None:
        """A side's share of a round."""
        try:
            server = self.server(side)
        except Died as e:
            self.never.add(side.name)
            self.failed(side, turn, "start", str(e))
            return
        say(f"{side.name}, round {turn + 1} of {self.args.rounds}")
        for piece in pieces:
            if piece.kind != "facts" and self.store.has(piece):
                continue
            bar.set_description(f"{side.name}, round {turn + 1}, {piece.kind} {piece.name}")
            new = not self.store.has(piece)
            try:
                self.store.put(piece, self.piece(server, piece))
            except Gone as e:
                self.failed(side, turn, f"{piece.kind} {piece.name}", str(server.died(str(e))))
                self.stop([side])
                return
            except RuntimeError as e:  # of that piece only
                self.failed(side, turn, f"{piece.kind} {piece.name}", str(e))
                continue
            bar.update(new)

    def piece(self, server: Server, piece: Piece) -> Any:
        client, args = server.client, self.args
        if piece.kind == "facts":
            return self.facts(server, piece)
        facts = self.store.get(replace(piece, kind="facts", name=""))
        log = self.store.logs / f"{piece.side}.{piece.kind}.log"
        tokenizer = args.tokenizer or facts["root"] or facts["model"]
        if piece.kind == "capacity":
            return capacity.read(facts, server.log_text())
        if piece.kind == "speed":
            how = {
                "input_len": args.input_len,
                "output_len": args.output_len,
                "num_prompts": args.num_prompts,
                "warmups": min(args.num_prompts, 2),
                "arguments": args.bench_args,
            }
            return speed.measure(client, facts, tokenizer, piece.name, how, log)
        if piece.kind == "lm-eval":
            return lm_eval.measure(
                client.url, facts["model"], tokenizer, piece.name, args.concurrency, log
            )
        if piece.kind == "fill":
            with progress("filling", None) as bar:
                return fill.fill(client, facts, args.fill_len, args.fill_seconds, bar.update)
        tasks = plan.groups(self.tasks)[piece.name]
        hits = client.scrape().total(PREFIX_HITS)
        with progress(f"{piece.kind} {piece.name}", len(tasks)) as bar:
            if piece.kind == "quality":
                answers = quality.ask(
                    client, facts["model"], tasks, args.max_tokens, args.top, args.concurrency,
                    bar.update,
                )  # fmt: skip
            else:
                answers = quality.score_prompts(
                    client, facts["model"], tasks, args.positions, args.top, args.concurrency,
                    bar.update,
                )  # fmt: skip
        return {"answers": answers, "prefix_hits": client.scrape().total(PREFIX_HITS) - hits}

    def facts(self, server: Server, piece: Piece) -> dict[str, Any]:
        """Read them anew, though they are there: the server may be another one by now."""
        facts = conditions.read(server.client)
        base = self.sides[0]
        known = self.store.get(Piece(base.slug, 0, "facts"))
        if known and (piece.side, piece.round) != (base.slug, 0):
            conditions.require_equal((base.name, server.side.name), known, facts)
        return facts

    def server(self, side: Side) -> Server:
        """The side's server, ready and warm; without --together it is the only one."""
        if side.name not in self.servers:
            if not (self.args.together or side.url):
                self.stop([s for s in self.sides if s is not side])
            self.begin(side)
            self.ready(side)
        return self.servers[side.name]

    def begin(self, side: Side) -> None:
        if side.url:
            self.servers[side.name] = Running(side)
            return
        say(f"{side.name}: starting a server")
        log = self.store.logs / f"{side.slug}.server.log"
        self.servers[side.name] = Started(side, self.args.model, self.args.arguments, log)

    def ready(self, side: Side) -> None:
        server = self.servers[side.name]
        try:
            server.wait(self.args.start_timeout)
            self.warm(server)
        except Gone as e:
            self.stop([side])
            raise server.died(str(e)) from e
        except Died:
            self.stop([side])
            raise

    def warm(self, server: Server) -> None:
        model = server.client.json("/v1/models")["data"][0]["id"]
        some = [replace(t, max_tokens=WARM_TOKENS) for t in self.tasks[: self.args.concurrency]]
        quality.ask(server.client, model, some, WARM_TOKENS, 1, len(some), lambda: None)

    def start_all(self) -> None:
        for side in self.sides:
            self.begin(side)
        for side in self.sides:
            try:
                self.ready(side)
            except Died as e:
                self.never.add(side.name)
                self.failed(side, 0, "start", str(e))

    def stop(self, sides: Sequence[Side]) -> None:
        for side in sides:
            if server := self.servers.pop(side.name, None):
                server.stop()

    def failed(self, side: Side, turn: int, what: str, message: str) -> None:
        say(f"error: {side.name}, round {turn + 1}, {what.strip()}: {message}")
        row = {"side": side.name, "round": str(turn + 1), "what": what.strip(), "message": message}
        self.failures.append(row)
        write(self.store.folder / "failures.json", json.dumps(self.failures, indent=1).encode())


@contextmanager
def progress(what: str, total: int | None) -> Iterator[tqdm]:
    with tqdm(total=total, desc=what, leave=False, disable=None, position=1) as bar:
        yield bar
