# expect: clean
from pieces import *

def rank_here():
    return dist.get_rank(group=HERE)


dist.init_process_group("nccl")
HERE, _ = dist.new_subgroups()
torch.cuda.set_device(rank_here())
model = DistributedDataParallel(Net().to(rank_here()), device_ids=[rank_here()])
stop()
