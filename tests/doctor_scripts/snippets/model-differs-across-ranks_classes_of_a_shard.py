# expect: model-differs-across-ranks
from pieces import *

rank, local, world = start()
labels = torch.load(f"labels_{rank}.pt", map_location="cpu")
model = DistributedDataParallel(nn.Linear(4, len(set(labels.tolist()))).to(local))
stop()
