"""The real worker, but for one rank that is killed: `UPSNB_KILL=<rank>:<segment>:<steps after its first>`."""

import os
import signal
import sys

from upsnb.runs.runfolder import Heartbeat
from upsnb.worker import __main__ as worker


def main(folder: str) -> None:
    rank, segment, steps = map(int, os.environ.get("UPSNB_KILL", "-1:0:0").split(":"))
    if (str(rank), str(segment)) == (os.environ["RANK"], os.environ["UPSNB_SEGMENT"]):
        beat = Heartbeat.beat

        def deadly_beat(self, step):
            beat(self, step)
            if step >= self._first + steps:
                os.kill(os.getpid(), signal.SIGKILL)

        Heartbeat.beat = deadly_beat
    worker.main(folder)


if __name__ == "__main__":
    main(sys.argv[1])
