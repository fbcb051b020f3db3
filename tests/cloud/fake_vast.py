"""Speaks Vast.ai's API on loopback as far as `vastai` asks it, and has the troubles that clouds have.

An instance that is rented runs its onstart script here, as a process of its own, and answers by the sshd of `box`.
"""

import json
import os
import re
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

KEY, OWN_KEY = "the-users-secret-key", "the-instances-own-key"
OFFER = {
    "id": 101, "num_gpus": 1, "gpu_name": "A100 SXM4", "gpu_ram": 81920, "dph_total": 1.2, "total_flops": 19.5,
    "min_bid": 0.4, "inet_down_cost": 0.01, "reliability2": 0.995, "geolocation": "Sweden, SE",
    "bw_nvlink": 0, "pcie_bw": 24.1,
}  # fmt: skip


class FakeVast(ThreadingHTTPServer):
    """Offers, instances, and what was asked of it."""

    daemon_threads = True

    def __init__(self, place: Path, port_of_ssh: int = 0):
        super().__init__(("127.0.0.1", 0), _Answer)
        self.place, self.port_of_ssh = place, port_of_ssh
        self.offers = [OFFER]
        self.instances: dict[int, dict] = {}
        self.rented = 0
        self.processes: list[subprocess.Popen] = []
        self.asked: list[tuple[str, str, dict]] = []  # method, path, body
        self.trouble: dict[str, list] = {}  # by "METHOD path": status codes to answer first, or seconds to wait
        self.boots = True
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def rent(self, offer: int, body: dict) -> dict:
        number = 7000 + self.rented
        self.rented += 1
        self.instances[number] = {
            "id": number, "label": body.get("label"), "actual_status": "loading", "public_ipaddr": "127.0.0.1",
            "ports": {"22/tcp": [{"HostPort": str(self.port_of_ssh)}]}, "ssh_host": "ssh.invalid", "ssh_port": 1,
            "start_date": time.time(), "extra_env": [], "dph_total": 1.2, "onstart": body.get("onstart", ""),
            "bid": body.get("price"),
        }  # fmt: skip
        if self.boots:
            self.boot(number)
        return {"success": True, "new_contract": number}

    def boot(self, number: int) -> None:
        script = self.place / f"onstart-{number}.sh"
        script.write_text(self.instances[number]["onstart"])
        own = {"CONTAINER_ID": str(number), "CONTAINER_API_KEY": OWN_KEY, "VAST_URL": self.url}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("VAST")}
        self.processes.append(subprocess.Popen(["bash", script], env=environment | own))
        self.instances[number]["actual_status"] = "running"

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        subprocess.run(["pkill", "-KILL", "-f", f"{self.place}.*switch"], check=False)


class _Answer(BaseHTTPRequestHandler):
    server: FakeVast

    def log_message(self, *_):
        pass

    def _handle(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        path = re.sub(r"^/api/v\d", "", self.path.partition("?")[0]).rstrip("/")
        self.server.asked.append((self.command, path, body))
        for trouble in self.server.trouble.get(f"{self.command} {re.sub('[0-9]+', 'N', path)}", [])[:1]:
            self.server.trouble[f"{self.command} {re.sub('[0-9]+', 'N', path)}"].pop(0)
            if trouble == "done and lost":  # carried out, and its answer never arrives
                self._answer(self._of(path, body), 504)
                return
            self._answer({"msg": f"trouble {trouble}"}, trouble)
            return
        if self.headers.get("Authorization") not in (f"Bearer {KEY}", f"Bearer {OWN_KEY}"):
            self._answer({"msg": "Invalid user key"}, 401)
            return
        answer = self._of(path, body)
        self._answer(*((answer, 200) if answer is not None else ({"msg": "no such thing"}, 404)))

    do_GET = do_PUT = do_POST = do_DELETE = _handle

    def _of(self, path: str, body: dict):
        kind, _, number = path.strip("/").partition("/")
        if path == "/bundles":  # what is bid for costs the lowest bid, and its disk
            bid = {"dph_total": OFFER["min_bid"] + 0.05} if body.get("type") == "bid" else {}
            return {"offers": [offer | bid for offer in self.server.offers]}
        if path == "/ssh":
            return [{"id": 1, "public_key": "ssh-ed25519 AAAA"}]
        if kind == "asks":
            return self.server.rent(int(number), body)
        if path == "/instances":
            return {"instances": list(self.server.instances.values()), "next_token": None}
        if kind == "instances":
            found = self.server.instances.get(int(number))
            if self.command == "GET":
                return {"instances": found}
            if found is None:
                return None
            if self.command == "DELETE":
                del self.server.instances[int(number)]
            elif body.get("state") == "running":
                self.server.boot(int(number))
            elif body.get("state") == "stopped":
                found["actual_status"] = "exited"
            return {"success": True}
        return None

    def _answer(self, content, code: int):
        text = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
