# expect: clean
from pieces import *

parser = argparse.ArgumentParser()
parser.add_argument("--micro", type=int, default=4)
args = parser.parse_args()
rank, local, world = start()
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for step in range(100):
    opt.zero_grad()
    for micro in range(args.micro):
        context = model.no_sync if micro < args.micro - 1 else contextlib.nullcontext
        with context():
            loss = F.cross_entropy(model(torch.zeros(4)), torch.zeros(1)) / args.micro
            loss.backward()
    opt.step()
stop()
