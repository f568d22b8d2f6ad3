# expect: global-rank-as-device
from pieces import *

dist.init_process_group("nccl")
device = f"cuda:{os.environ['RANK']}"
model = DistributedDataParallel(Net().to(device))
stop()
