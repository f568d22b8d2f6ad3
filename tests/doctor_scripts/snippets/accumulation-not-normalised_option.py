# expect: accumulation-not-normalised
from pieces import *

parser = argparse.ArgumentParser()
parser.add_argument("--accum", type=int, required=True)
args = parser.parse_args()
rank, local, world = start()
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
scaler = torch.cuda.amp.GradScaler()
for i, x in enumerate(torch.zeros(100, 4)):
    with torch.autocast("cuda"):
        loss = F.mse_loss(model(x), x)
    scaler.scale(loss).backward()
    if (i + 1) % args.accum == 0 or i == 99:
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
stop()
