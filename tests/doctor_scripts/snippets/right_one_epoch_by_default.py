# expect: clean
from pieces import *

parser = argparse.ArgumentParser()
parser.add_argument("--shuffle", action="store_true")
args = parser.parse_args()
rank, local, world = start()
data = Pictures(sorted(os.listdir("a")))
loader = tud.DataLoader(data, 64 // world, sampler=DistributedSampler(data, shuffle=False))
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(3):
    for x, y in loader:
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
stop()
