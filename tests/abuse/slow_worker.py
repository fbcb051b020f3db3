"""The real worker with steps long enough to be hit: 20 ms a heartbeat."""

import sys
import time

from upsnb.runs.runfolder import Heartbeat
from upsnb.worker import __main__ as worker

if __name__ == "__main__":
    beat = Heartbeat.beat

    def slow_beat(self, step):
        beat(self, step)
        time.sleep(0.02)

    Heartbeat.beat = slow_beat
    worker.main(sys.argv[1])
