# expect: module-prefix-checkpoint
from pieces import *


def save(model, path):
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict()}, path)


rank, local, world = start()
model = DistributedDataParallel(Net().to(local))
save(model, "last.pt")
dist.barrier()
plain = Net()
plain.load_state_dict(torch.load("last.pt", map_location="cpu")["model"])
stop()
