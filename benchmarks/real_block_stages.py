import math, sys, time, torch
from keyhole.oracle import load
import keyhole.extract.blocks.behind as bh, keyhole.extract.blocks.rank_ones as ro, keyhole.extract.blocks.descent as ds
target, out = sys.argv[1:3]
dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
t = load(target); d = t.dim; cnt = [0]; T0 = time.time(); f = open(out, "a")
def log(*a):
    line = f"{time.time()-T0:.0f}s {cnt[0]} " + " ".join(map(str, a)); print(line, flush=True); f.write(line + "\n"); f.flush()
def ask(q):
    cnt[0] += len(q)
    return torch.cat([t(p) for p in q.split(8192)])
def wrap(mod, name, say=lambda r: ""):
    g = getattr(mod, name)
    def h(*a, **k):
        s = time.time(); r = g(*a, **k); log(name, f"{time.time()-s:.1f}s", say(r)); return r
    setattr(mod, name, h)
def space(self, device, old=bh._Measured.space):
    log("measured", len(self.points), len(self.U)); b, e = old(self, device); log("space", len(b), e); return b, e
bh._Measured.space = space
wrap(ro, "_distinct", len); wrap(bh, "_mixed"); wrap(bh, "_shapes", lambda r: (r[3].median().item(), r[3].max().item())); wrap(bh, "_numbers", lambda r: r[0])
def step(model, numbers, rest, solve, old=ds._step):
    log("rest", float(rest.norm())); s = time.time(); r = old(model, numbers, rest, solve); log("step", f"{time.time()-s:.1f}s"); return r
ds._step = step
wrap(bh, "signed"); wrap(bh, "find_units"); wrap(bh, "fitted", lambda r: r[1])
b = bh.read(ask, d, dev, torch.Generator().manual_seed(0))
torch.save((b.axes, b.second, b.first, b.layer, b.D), out + ".pt")
M = torch.einsum("hdk,hkm->dm", t.V, t.O); M = M - M.mean(1, keepdim=True)
k = t.D.square().mean().sqrt()
A, C = (t.A - t.A.mean(1, keepdim=True)) @ b.axes, (t.C - t.C.mean(0)).mT @ b.axes / k
u = b.layer.units
near = torch.cdist(A, u.A).argmin(1)
rel = lambda x, y: float((x - y).abs().max() / y.abs().max())
log("E", rel(b.second.E, t.E), "e", rel(b.second.e, t.e), "M", rel(b.first.total, M), "b", rel(b.first.b, t.b - t.b.mean()), "D", rel(b.D, t.D / k),
    "A", rel(u.A[near], A), "a", rel(u.a[near], t.a), "C", rel(u.C.mT[near], C), "c", rel(b.layer.c, t.c @ b.axes / k), "distinct", len(near.unique()))
