# expect: world-size-mismatch
from pieces import *

dist.init_process_group("nccl", rank=int(os.environ["RANK"]), world_size=torch.cuda.device_count())
stop()
