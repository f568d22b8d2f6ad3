# expect: clean
from pieces import *

rank, local, world = start()
here = int(os.environ["LOCAL_WORLD_SIZE"])
first = (dist.get_rank() * 2) % here
model = DistributedDataParallel(Net().to(first))
stop()
