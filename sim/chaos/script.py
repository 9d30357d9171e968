"""The commands of a step as text for a shell. Pure.

Every command begins by appending its number to a file: what ran twice is there twice,
what never ran is not there.
"""

from __future__ import annotations

import shlex

from sim.chaos.trace import Step

DIARY = "/var/lib/chaos-steps"
"""Numbers of the commands that began, a line each."""
SESSION_DIARY = "/var/lib/chaos-session"
"""What the session's own counter came to, a line for each of its commands."""
FIRST_PORT = 20_000
MEMORY_LIMIT_MB = 512
PIDS_LIMIT = 192

_FILL = "import time;b=bytearray({mb}<<20);b[::4096]=bytes(len(b[::4096]));"
_BURN = _FILL + "e=time.perf_counter()+{s}\nwhile time.perf_counter()<e:sum(range(2000))"
_FORKS = """
import os,signal
pids=[]
try:
    while len(pids)<100000:
        pid=os.fork()
        if not pid: signal.pause(); os._exit(0)
        pids.append(pid)
except BlockingIOError: print("limit")
for pid in pids: os.kill(pid,9); os.waitpid(pid,0)
"""
_OOM = "b=[]\nwhile True: b.append(bytes([1])*(16<<20))"
_INSTALL = """
import os,time
d="/tmp/site-{n}"; os.makedirs(d)
for i in range({mb}): open(f"{{d}}/{{i}}.py","wb").write(b"x=1\\n"*(1<<18))
time.sleep({s})
"""


def command(step: Step) -> str:
    """A command line that notes its number, and does the step's work."""
    if step.kind == "session":
        counted = f"n=$((${{n:-0}}+1)); echo $n >> {SESSION_DIARY}; "
        return f"echo {step.number} >> {DIARY}; {counted}{_work(step)}"
    return f"echo {step.number} >> {DIARY}; {_work(step)}"


def _work(step: Step) -> str:
    said = f"head -c {step.size} /dev/zero | tr '\\0' x"
    match step.work:
        case "python" | "test":
            return f"{_python(_BURN.format(mb=step.memory_mb, s=step.seconds))}; {said}"
        case "install":
            text = _INSTALL.format(n=step.number, mb=step.memory_mb, s=step.seconds)
            return f"{_python(text)}; {said}"
        case "hang":
            return "sleep 1000 & setsid sh -c 'sleep 1000 & wait' & wait"
        case "binary":
            return f"{said}; printf '\\377\\376\\200'"
        case "forks":
            return _python(_FORKS)
        case "oom":
            return _python(_OOM)
        case "server":
            port = FIRST_PORT + step.number
            serve = f"nohup python3 -m http.server {port} --bind 127.0.0.1"
            return f"{serve} >/dev/null 2>&1 & echo {port}"
        case _:
            return said


def _python(text: str) -> str:
    return f"python3 -c {shlex.quote(text)}"
