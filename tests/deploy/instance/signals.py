#!/usr/bin/python3
"""Stands for the address that a wait condition gives: keeps what is put there, a line each."""

from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with open("/var/log/signals.jsonl", "ab") as f:
            f.write(body.strip() + b"\n")
        self.send_response(200)
        self.end_headers()


HTTPServer(("127.0.0.1", 80), Handler).serve_forever()
