from typing import NamedTuple

FORWARD = "forward"
BACKWARD = "backward"


class Step(NamedTuple):
    stage: int
    microbatch: int
    kind: str


def parse(name):
    return name.lower()


def default_microbatches(stages, rows):
    return max(1, min(4 * stages, rows))


def order(name, stages, microbatches):
    K, M = stages, microbatches
    out = []
    for s in range(K):
        F = [Step(s, m, "forward") for m in range(M)]
        B = [Step(s, m, "backward") for m in range(M)]
        if name == "gpipe":
            out.append(F + B)
            continue
        w = min(M, K - s)
        l = F[:w]
        f = w
        for m in range(M):
            l.append(B[m])
            if f < M:
                l.append(F[f])
                f += 1
        out.append(l)
    return out


def merged(orders):
    done = set()
    pos = [0] * len(orders)
    res = []
    K = len(orders)
    n = sum(map(len, orders))
    while len(res) < n:
        moved = False
        new = []
        for s, o in enumerate(orders):
            if pos[s] < len(o):
                st = o[pos[s]]
                ok = (
                    st.kind == "forward" and (s == 0 or (s - 1, st.microbatch, "forward") in done)
                ) or (
                    st.kind == "backward"
                    and (s, st.microbatch, "forward") in done
                    and (s == K - 1 or (s + 1, st.microbatch, "backward") in done)
                )
                if ok:
                    new.append(st)
                    pos[s] += 1
                    moved = True
        if not moved:
            raise ValueError("deadlock")
        res += new
        done |= {(t.stage, t.microbatch, t.kind) for t in new}
    return res
