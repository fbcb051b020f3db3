#!/bin/bash
# Runs on a rented instance from its first second, and stops it: when it was held for so long, or when nothing trains and
# nobody asked for anything. A stopped instance costs its disk alone, and what lies there stays. `name=` lines come first.
life=$place/life held=$place/held
mkdir -p "$place" && cd "$place" || exit 1
api() { # the instance's own key comes from its environment and is in no command line
    python3 - "$@" <<'P'
import os, sys, urllib.request as web
url = os.environ.get("VAST_URL", "https://console.vast.ai") + f"/api/v0/instances/{os.environ['CONTAINER_ID']}/"
head = {"Authorization": "Bearer " + os.environ["CONTAINER_API_KEY"], "Content-Type": "application/json"}
body = b'{"state": "stopped"}' if sys.argv[1:] else None
web.urlopen(web.Request(url, body, head, method="PUT" if body else "GET"), timeout=60).read()
P
}
stop() {
    trap - TERM INT HUP
    echo "$(date) stops: $why"
    until api stop; do sleep "$every"; done
}
why="the switch was ended"
trap stop EXIT
trap 'exit 1' TERM INT HUP
date > "$life"
for run in */process; do # before this start: its number may be another process's now
    [ -e "$run" ] && [ ! -e "${run%process}exit_code" ] && echo lost > "${run%process}exit_code"
done
if [ -s "$held" ]; then least=$(($(cat "$held") + again)) && ((limit >= least)) || limit=$least; fi # for a pull
api && touch armed || rm -f armed # nothing is sent here before it says that it can stop the instance
while sleep "$every"; do
    now=$(($(cat "$held" 2>/dev/null || echo 0) + every))
    echo $now > "$held" # all the time that it was paid for, after a stop and a start too
    for run in */process; do # while one trains there is life
        [ -e "$run" ] && [ ! -e "${run%process}exit_code" ] && kill -0 "$(cat "$run")" && date > "$life"
    done 2>/dev/null
    if ((now >= limit - grace)) && [ ! -e warned ]; then # it saves and ends by itself
        touch warned
        for own in */outputs/*/ */outputs/*/runs/*/; do # a run, or those that a study trains
            [ -e "$own/manifest.json" ] || continue
            (cd "${own%%/*}" && PYTHONPATH=$PWD venv/bin/python -m upsnb stop "${own#*/}")
        done
    fi
    if ((now >= limit)); then why="held for $limit s" && break; fi
    if (($(date +%s) - $(stat -c %Y "$life") >= idle)); then why="nothing happened for $idle s" && break; fi
done
