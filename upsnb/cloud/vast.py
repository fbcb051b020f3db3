"""Training on GPUs rented from Vast.ai, by its own command `vastai`, which keeps the key; this code never reads one.

Whatever happens, money is safe twice: what fails before a run trains destroys its instance, and every instance starts
with a switch (`switch.sh`) that stops it when its budget is spent or nothing happens any more.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from upsnb.cloud.host import Host
from upsnb.config import RunConfig
from upsnb.errors import ConfigError, DataError, RunError
from upsnb.overlays import project_root

COMMAND = ".vastai/bin/vastai"  # in the project, made by `make .vastai/.installed`; else the one on the PATH
# Python with its venv, and a C++ compiler for torch.compile; torch comes with the packages
IMAGE = "python:3.12-bookworm"
PLACE = "upsnb-runs"  # from root's home there
ONSTART_BYTES = 4048  # Vast's limit
WHEEL_CUDA, WHEEL_CAPABILITY = 13.0, 7.5  # of torch's wheels on PyPI, 2.11 to 2.13
BF16_CAPABILITY = 8.0
RELIABILITY, DOWN_MBIT = 0.98, 200
SOFTWARE_GB, DOWNLOADED_GB = 12.0, 4.0  # packages as installed, and as they come
CHECKPOINTS_GB = 7.5
PCIE_GB_S = 10  # of several GPUs; sixteen lanes of PCIe 3 measure 12
MOST_OFFERS = 200  # the cheapest by the hour
START_H = 0.25  # until packages are there and it trains
OUTBID = 1.25  # of the lowest bid that is taken: the lowest itself is outbid by whoever comes next
BOOT_S, LOOK_S = 1800.0, 10.0
IDLE_S, GRACE_S, EVERY_S = 1800, 180, 10
AGAIN_S = 900  # for what lies on an instance that is started once more, though its budget is spent
ANSWER_S = 180.0

Say = Callable[[str], None]


def ask(*arguments: str):
    """What `vastai` answers to a command, as data; errors as of `tell`."""
    said = tell(*arguments)
    try:
        return json.loads(said) if said else None
    except ValueError:
        raise RunError(f"vastai {' '.join(arguments[:2])}: answered {said[:200]!r} -> try again") from None


def tell(*arguments: str) -> str:
    """What `vastai` prints; some commands print a sentence though they are asked for data.

    Raises:
        RunError: it is not installed, refused, or failed; with its words.
    """
    own = project_root() / COMMAND
    program = str(own) if own.exists() else shutil.which("vastai")
    if program is None:
        raise RunError("vastai: is not installed -> make .vastai/.installed, then .vastai/bin/vastai set api-key KEY")
    what = " ".join(arguments[:2])
    try:
        done = subprocess.run(
            [program, *arguments, "--raw"],
            env={**os.environ, "VASTAI_NO_UPDATE_CHECK": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"vastai {what}: no answer for {ANSWER_S:g} s -> try again") from None
    said = done.stderr.strip()
    try:
        failure = json.loads(said[said.rindex("{") :]) if "{" in said else {}
    except ValueError:
        failure = {}
    if failure.get("error"):  # its exit code is 0 then
        code, remedy = failure.get("status_code"), ""
        if code in (401, 403):
            remedy = " -> .vastai/bin/vastai set api-key KEY, or the environment's VAST_API_KEY"
        raise RunError(f"vastai {what}: {code}: {failure.get('msg')}{remedy}")
    if done.returncode:
        lines = said.splitlines() or done.stdout.strip().splitlines() or [f"exit code {done.returncode}"]
        if "requests.exceptions" in lines[-1]:
            raise RunError(f"vastai {what}: Vast.ai cannot be reached -> check the connection ({lines[-1][-80:]})")
        raise RunError(f"vastai {what}: {lines[-1][:300]}")
    return done.stdout.strip()


# -- offers ------------------------------------------------------------------------------------------------------------


def needs(config: RunConfig) -> dict:
    """What a machine must have to train this, from the settings alone.

    Returns:
        GPUs, memory of each [GiB], None where the data files that it is predicted from are not here, disk [GB], data to
        fetch [GB], hours of training, None where it ends by its epochs, CUDA of the driver, compute capability.
    Raises:
        ConfigError: it trains on no GPU, or on several machines.
    """
    from upsnb.data.published import PUBLISHED
    from upsnb.memory import plan
    from upsnb.memory.predict import CUDA_GRANULARITY, Predictor

    training = config.training
    if training.device == "cpu" or training.num_nodes > 1:
        remedy = "training.device: auto, training.num_nodes: 1"
        raise ConfigError([f"training: an instance is one machine with GPUs -> {remedy}"])
    sizes = {file.name: file.size_gib * 2**30 / 1e9 for files in PUBLISHED.values() for file in files}
    wanted = {Path(file).name for dataset in config.data.datasets.values() for file in dataset.files}
    data_gb = sum(size for name, size in sizes.items() if name in wanted)
    try:
        peak_gib = Predictor(config, granularity=CUDA_GRANULARITY).at().gib
    except DataError:  # files that are not here, and their fields' size with them
        peak_gib = None
    halves, limits = training.amp and training.amp_dtype == "bfloat16", [*map(config.limit_s, config.stages.planned)]
    return {
        "num_gpus": training.num_gpus,
        "gpu_gib": round(peak_gib * (1 + plan.FRAGMENTATION) + plan.RESERVE_GIB, 2) if peak_gib else None,
        "disk_gb": round(SOFTWARE_GB + data_gb + CHECKPOINTS_GB + 5),
        "data_gb": round(data_gb, 1),
        "hours": None if None in limits else round(sum(limits) / 3600, 3),
        "cuda": WHEEL_CUDA,
        "capability": BF16_CAPABILITY if halves else WHEEL_CAPABILITY,
    }


def query(wanted: dict, max_price: float | None = None) -> str:
    """The needs in the words of `vastai search offers`."""
    terms = [
        f"num_gpus={wanted['num_gpus']}",
        *([f"gpu_ram>={wanted['gpu_gib'] * 1.024:.2f}"] if wanted["gpu_gib"] else []),  # it counts 1000 MiB
        f"disk_space>={wanted['disk_gb']}",
        f"cuda_vers>={wanted['cuda']:g}",
        f"compute_cap>={wanted['capability'] * 100:.0f}",
        f"reliability>={RELIABILITY}",
        f"inet_down>={DOWN_MBIT}",
        *([f"pcie_bw>={PCIE_GB_S}"] if wanted["num_gpus"] > 1 else []),  # gradients travel there, unless over NVLink
        "direct_port_count>=1",
        "cpu_arch=amd64",
        "gpu_arch=nvidia",
    ]
    return " ".join(terms + ([f"dph<={max_price:g}"] if max_price else []))


def offers(
    wanted: dict, budget: float | None = None, max_price: float | None = None, interruptible: bool = False
) -> list[dict]:
    """The machines to be had that have what is needed, the cheapest for the whole run first.

    A run with a time limit costs price times time, start-up and downloads. One that ends by its epochs costs the less
    the more floating-point operations a dollar buys: those of the GPUs' data sheets, of which no run uses all.

    Args:
        wanted: as `needs` says.
        interruptible: those that are bid for, at a bid of OUTBID times the lowest; a higher one takes the machine away.
    """
    terms, disk, hours = query(wanted, max_price), str(wanted["disk_gb"]), wanted["hours"]
    kind = ["--type", "bid" if interruptible else "on-demand"]
    found = ask("search", "offers", terms, *kind, "--limit", str(MOST_OFFERS), "--order", "dph", "--storage", disk)
    rows = []
    for offer in found or []:
        price, bid = float(offer["dph_total"]), None
        if interruptible:  # the total is the lowest bid and what the disk costs
            lowest = float(offer["min_bid"])
            bid = round(OUTBID * lowest, 4)
            price += bid - lowest
            if max_price and price > max_price:
                continue
        traffic = float(offer.get("inet_down_cost") or 0) * (wanted["data_gb"] + DOWNLOADED_GB)
        tflops = float(offer.get("total_flops") or 0)
        rows.append(
            {
                "id": int(offer["id"]),
                "gpus": f"{offer['num_gpus']} x {offer['gpu_name']}",
                "gib": round(float(offer["gpu_ram"]) / 1024, 1),
                "price_per_hour": round(price, 4),
                "bid": bid,
                "dollars": round(price * (START_H + hours) + traffic, 3) if hours else None,
                "tflops_per_dollar": round(tflops / price, 1) if price else 0.0,
                "hours_for_budget": round(budget / price, 2) if budget and price else None,
                "nvlink_gb_s": round(float(offer.get("bw_nvlink") or 0)),
                "pcie_gb_s": round(float(offer.get("pcie_bw") or 0), 1),
                "reliability": round(float(offer.get("reliability2") or offer.get("reliability") or 0), 4),
                "where": str(offer.get("geolocation") or ""),
            }
        )
    rows.sort(key=lambda row: (row["dollars"], row["id"]) if hours else (-row["tflops_per_dollar"], row["id"]))
    return rows


# -- instances ---------------------------------------------------------------------------------------------------------


def onstart(limit_s: float) -> str:
    """What an instance runs first of all, each time it starts: the switch, which goes on beside everything else.

    Raises:
        RunError: it is longer than Vast takes.
    """
    place = PurePosixPath("/root") / PLACE
    settings = {
        "place": place,
        "limit": int(limit_s),
        "grace": GRACE_S,
        "idle": IDLE_S,
        "every": EVERY_S,
        "again": AGAIN_S,
    }
    lines = (Path(__file__).parent / "switch.sh").read_text().splitlines()
    body = [line for line in lines if not line.startswith("#")]
    switch = "\n".join([f"{name}={shlex.quote(str(value))}" for name, value in settings.items()] + body)
    text = f"mkdir -p {place}; cat > {place}/switch <<'SWITCH'\n{switch}\nSWITCH\n"
    text += f"setsid nohup bash {place}/switch >> {place}/switch.log 2>&1 < /dev/null &\n"
    if len(text.encode()) >= ONSTART_BYTES:
        raise RunError(f"the switch takes {len(text.encode())} bytes, Vast takes {ONSTART_BYTES}")
    return text


def create_command(offer: dict, wanted: dict, label: str, script: Path, image: str) -> list[str]:
    """The arguments of `vastai` that rent one of `offers`."""
    named = ["--image", image, "--disk", str(wanted["disk_gb"]), "--label", label, "--onstart", str(script)]
    named += ["--bid_price", str(offer["bid"])] if offer["bid"] else []
    return ["create", "instance", str(offer["id"]), *named, "--ssh", "--direct", "--cancel-unavail", "--retry", "1"]


def create(command: list[str], label: str) -> int:
    """Rent; the instance's number. One whose number never arrived is found by its label, and is not rented twice.

    Raises:
        RunError: it was taken by somebody else, there is no credit, or no answer.
    """
    try:
        answer = ask(*command)
        if answer and answer.get("success"):
            return int(answer["new_contract"])
        raise RunError(f"vastai create instance: {json.dumps(answer)[:200]} -> choose another offer")
    except RunError as error:
        try:
            rented = [instance for instance in instances() if instance.get("label") == label]
        except RunError:
            look = f"whether {label} was rented nobody says -> look at console.vast.ai; it stops itself"
            raise RunError(f"{error}; {look}") from None
        if rented:
            return int(rented[0]["id"])
        raise


def instances() -> list[dict]:
    """All that is rented."""
    return list(ask("show", "instances") or [])


def instance(number: int) -> dict | None:
    """One of them; None: it is gone."""
    try:
        found = ask("show", "instance", str(number))
    except RunError as error:
        if "404" in str(error) or "not found" in str(error):
            return None
        raise
    return found if found and found.get("id") else None


def wait(number: int, known: Path, say: Say) -> Host:
    """The instance as a host, once it answers and its switch says that it can stop it.

    Args:
        known: file for its key.
    Raises:
        RunError: it did not come up in time, is gone, or cannot be stopped from inside.
    """
    deadline, told = time.monotonic() + BOOT_S, ""
    while True:
        found = instance(number)
        if found is None:
            raise RunError(f"instance {number}: is gone")
        status = str(found.get("actual_status") or found.get("cur_state") or "created")
        problem = status
        if status == "running" and (host := address(found, known)):
            try:
                host.run(f"[ -e {PLACE}/armed ] || {{ echo its switch has not reached Vast yet >&2; exit 3; }}")
                return host
            except RunError as error:
                problem = f"running, {error}"
        if problem != told:
            say(f"instance {number}: {problem}")
            told = problem
        if time.monotonic() > deadline:
            raise RunError(f"instance {number}: {problem}, {BOOT_S:g} s after it was asked for -> choose another offer")
        time.sleep(LOOK_S)


def address(found: dict, known: Path) -> Host | None:
    """Where an instance answers ssh: directly where it has a port of its own, else through Vast's proxy."""
    ports = (found.get("ports") or {}).get("22/tcp")
    if ports and found.get("public_ipaddr"):
        return Host(f"root@{found['public_ipaddr'].strip()}", int(ports[0]["HostPort"]), PLACE, str(known))
    if found.get("ssh_host") and found.get("ssh_port"):
        return Host(f"root@{found['ssh_host']}", int(found["ssh_port"]), PLACE, str(known))
    return None


def start_again(number: int) -> None:
    """Let a stopped instance run again, as long as its switch allows."""
    said = tell("start", "instance", str(number))
    if not said.startswith("starting"):
        raise RunError(f"instance {number}: cannot be started ({said[:200]}) -> later, its disk is kept")


def destroy(number: int) -> None:
    """End an instance with all that is on it; one that is gone already is no error."""
    try:
        tell("destroy", "instance", str(number), "--yes")
    except RunError:
        if instance(number) is not None:
            raise
    if (left := instance(number)) is not None and left.get("actual_status") == "running":
        raise RunError(f"instance {number}: is still there and costs -> try again, or end it at console.vast.ai")


def ssh_keys() -> list:
    """The account's public keys; without one nobody gets into an instance."""
    found = ask("show", "ssh-keys")
    return list(found.get("ssh_keys", found.values()) if isinstance(found, dict) else found or [])
