# expect: unsynced-optimizer-step
from pieces import *

parser = argparse.ArgumentParser()
parser.add_argument("--accumulate", type=int, default=4)
args = parser.parse_args()
rank, local, world = start()
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for i in range(1000):
    last = i % args.accumulate == 0
    with contextlib.nullcontext() if last else model.no_sync():
        (F.cross_entropy(model(torch.zeros(4)), torch.zeros(1)) / args.accumulate).backward()
    if (i + 1) % args.accumulate == 0:
        opt.step()
        opt.zero_grad()
stop()
