# expect: threads-oversubscribed
from pieces import *

os.environ["OMP_NUM_THREADS"] = str(os.cpu_count())
rank, local, world = start()
stop()
