"""What the reader knows of torch and of what surrounds it, as tables: by full name, what a call means and gives."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from paceline.doctor.reading.values import words
from paceline.doctor.torch_names import COLLECTIVES, LAUNCHER_VARIABLES, TRACKERS

__all__ = [
    "KEPT",
    "LAUNCHED",
    "LIBRARIES",
    "MEAN_LOSSES",
    "METHODS",
    "Api",
    "api",
    "canonical",
    "may_agree",
    "names_a_rank",
    "speaks_of_ranks",
]


@dataclass(frozen=True, slots=True)
class Api:
    """A call that means something.

    Args:
        role: of the `Event` that it is; empty: none.
        makes: the kind of what it gives; empty: a tensor or number made of its arguments; ``first``: its first one.
        parameters: names of the positional ones.
    """

    role: str = ""
    makes: str = ""
    parameters: tuple[str, ...] = ()


def _table(text: str) -> dict[str, Api]:
    """One line each: name, role, kind, parameters; a dash for none."""
    found = {}
    for line in text.strip().splitlines():
        name, role, makes, *parameters = line.split()
        found[name] = Api(role.strip("-"), makes.strip("-"), tuple(parameters))
    return found


_FUNCTIONS = _table("""
torch.distributed.init_process_group init - backend init_method timeout world_size rank store
torch.distributed.destroy_process_group destroy - group
torch.distributed.get_rank - - group
torch.distributed.get_world_size - - group
torch.distributed.is_initialized - - -
torch.distributed.is_available - - -
torch.distributed.new_group collective group ranks timeout backend
torch.distributed.nn.functional.all_gather collective - tensor group
torch.distributed.nn.functional.all_reduce collective - tensor op group
torch.distributed.nn.functional.broadcast collective - tensor src group
torch.distributed.nn.functional.reduce collective - tensor dst op group
torch.distributed.nn.functional.gather collective - tensor dst group
torch.distributed.nn.functional.scatter collective - tensors src group
torch.distributed.nn.functional.reduce_scatter collective - output input_list op group
torch.distributed.nn.functional.all_to_all collective - output_tensor_list input_tensor_list group
torch.distributed.nn.functional.all_to_all_single collective - output input output_split_sizes input_split_sizes group
torch.nn.parallel.DistributedDataParallel wrap ddp module device_ids output_device dim broadcast_buffers \
init_sync process_group bucket_cap_mb find_unused_parameters check_reduction gradient_as_bucket_view \
static_graph
torch.nn.DataParallel legacy module module device_ids output_device dim
torch.nn.SyncBatchNorm.convert_sync_batchnorm convert first module process_group
torch.nn.utils.clip_grad_norm_ clip - parameters max_norm norm_type
torch.nn.utils.clip_grad_value_ clip - parameters clip_value
torch.nn.Sequential - module
torch.nn.ModuleList - module modules
torch.nn.ModuleDict - module modules
torch.nn.Parameter - parameter data requires_grad
torch.nn.Dropout module module p inplace
torch.nn.Identity - module
torch.utils.data.DataLoader loader loader dataset batch_size shuffle sampler batch_sampler num_workers \
collate_fn pin_memory drop_last timeout worker_init_fn multiprocessing_context generator
torch.utils.data.DistributedSampler sampler sampler dataset num_replicas rank shuffle seed drop_last
torch.utils.data.RandomSampler - sampler data_source replacement num_samples generator
torch.utils.data.SequentialSampler - sampler data_source
torch.utils.data.BatchSampler - sampler sampler batch_size drop_last
torch.utils.data.SubsetRandomSampler - sampler indices generator
torch.utils.data.WeightedRandomSampler - sampler weights num_samples replacement generator
torch.utils.data.TensorDataset - dataset
torch.utils.data.Subset - dataset dataset indices
torch.utils.data.ConcatDataset - dataset datasets
torch.utils.data.random_split split - dataset lengths generator
torch.utils.data.get_worker_info - - -
torch.utils.checkpoint.checkpoint checkpoint - function
torch.utils.checkpoint.checkpoint_sequential checkpoint - functions segments input
torch.amp.GradScaler scaler scaler device init_scale
torch.Generator - generator device
torch.device - device type index
torch.cuda.set_device set_device - device
torch.accelerator.set_device_index set_device - device
torch.accelerator.set_device_idx set_device - device
torch.cuda.device device context device
torch.cuda.device_count - - -
torch.cuda.is_available - - -
torch.no_grad - context
torch.inference_mode - context mode
torch.enable_grad - context
torch.set_grad_enabled - context mode
torch.autocast - context device_type dtype enabled
torch.amp.autocast - context device_type dtype enabled
torch.autograd.backward backward - tensors
torch.manual_seed seed generator seed
torch.cuda.manual_seed - - seed
torch.cuda.manual_seed_all - - seed
torch.set_num_threads threads - threads
torch.save save - obj f
torch.jit.save save - m f
torch.load load loaded f map_location pickle_module
torch.compile - first model
torch.jit.script - first obj
torch.multiprocessing.spawn spawn - fn args nprocs join daemon start_method
torch.multiprocessing.start_processes spawn - fn args nprocs join daemon start_method
torch.multiprocessing.Process process process group target name args kwargs
torch.optim.swa_utils.AveragedModel - unknown model
torch.distributed.algorithms.join.Join - context joinables
torch.distributed.run.main - - args
torch.initial_seed - - -
numpy.random.seed seed - seed
numpy.random.default_rng - generator seed
numpy.random.RandomState - generator seed
numpy.save save - file arr
numpy.savez save - file
random.seed seed - a
random.Random - generator x
random.shuffle shuffle - x
numpy.random.shuffle shuffle - x
transformers.set_seed seed - seed
lightning.fabric.utilities.seed.seed_everything seed - seed
pytorch_lightning.seed_everything seed - seed
sklearn.model_selection.train_test_split split -
safetensors.torch.save_file save - tensors filename
pickle.dump save - obj file protocol
wandb.log log - data step
logging.getLogger - logger name
logging.basicConfig logging -
mlflow.log_metric log - key value step
urllib.request.urlretrieve download - url filename
torch.hub.download_url_to_file download - url dst
torchvision.datasets.utils.download_url download - url root
torchvision.datasets.utils.download_and_extract_archive download - url download_root
gdown.download download - url output
wget.download download - url out
builtins.print print -
contextlib.nullcontext - context enter_result
contextlib.suppress - context
contextlib.redirect_stdout stdout context new_target
argparse.ArgumentParser - parser
copy.deepcopy - copy x
copy.copy - copy x
tempfile.mkdtemp - - -
tempfile.TemporaryDirectory - - -
os.cpu_count - - -
multiprocessing.cpu_count - - -
os.getpid - - -
time.time - - -
time.perf_counter - - -
time.monotonic - - -
datetime.datetime.now - - -
uuid.uuid4 - - -
socket.gethostname - - -
os.listdir - - path
os.scandir - - path
glob.glob - - pathname
glob.iglob - - pathname
sys.exit exit - status
os._exit exit - status
builtins.exit exit - status
builtins.quit exit - status
""")

_FUNCTIONS |= {f"torch.distributed.{name}": Api("collective", "", given) for name, given in COLLECTIVES.items()}
_FUNCTIONS |= {
    f"{module}.{name}": Api("tracker", "writer" if name == "SummaryWriter" else "", given)
    for (module, name), given in TRACKERS.items()
}

_LEVELS = "debug info warning warn error critical exception success"
_TOLD = Api("log", "", ("msg", *(f"given {index}" for index in range(8))))
_FUNCTIONS |= {f"{module}.{level}": _TOLD for module in ("logging", "loguru.logger") for level in _LEVELS.split()}

MEAN_LOSSES = words(
    "mse_loss l1_loss smooth_l1_loss huber_loss cross_entropy nll_loss binary_cross_entropy kl_div gaussian_nll_loss "
    "binary_cross_entropy_with_logits poisson_nll_loss ctc_loss triplet_margin_loss cosine_embedding_loss "
    "margin_ranking_loss hinge_embedding_loss soft_margin_loss multi_margin_loss multilabel_margin_loss "
    "MSELoss L1Loss SmoothL1Loss HuberLoss CrossEntropyLoss NLLLoss BCELoss KLDivLoss BCEWithLogitsLoss CTCLoss "
    "TripletMarginLoss CosineEmbeddingLoss MultiMarginLoss GaussianNLLLoss PoissonNLLLoss SoftMarginLoss"
)
"""Of ``torch.nn`` and ``torch.nn.functional``: losses that average over the batch unless told otherwise."""

METHODS: dict[str, dict[str, Api]] = {
    "tensor": _table("""
backward backward - gradient
detach - tensor
cuda cuda tensor device
to place tensor device
"""),
    "module": _table("""
parameters - parameters
named_parameters - parameters
buffers - buffers
named_buffers - buffers
modules - modules
named_modules - modules
children - modules
named_children - modules
state_dict - state_dict
load_state_dict load_state - state_dict strict
to place self device
cuda cuda self device
cpu - self
half - self
float - self
bfloat16 - self
double - self
train - self mode
eval - self
apply - self fn
requires_grad_ freeze self requires_grad
compile - self
share_memory - self
zero_grad zero_grad - set_to_none
register_buffer - - name tensor persistent
register_parameter store - name param
add_module store - name module
append store self module
no_sync - context
join - context
register_comm_hook comm_hook - state hook
"""),
    "optimizer": _table("""
step step - closure
zero_grad zero_grad - set_to_none
state_dict - state_dict
load_state_dict load_state - state_dict
add_param_group - - param_group
"""),
    "scheduler": _table("""
step schedule - epoch
state_dict - state_dict
load_state_dict load_state - state_dict
"""),
    "scaler": _table("""
scale - first outputs
step step - optimizer
update scaler_update - new_scale
unscale_ unscale - optimizer
state_dict - state_dict
load_state_dict load_state - state_dict
"""),
    "sampler": _table("""
set_epoch set_epoch - epoch
"""),
    "dataset": _table("""
set_epoch dataset_epoch - epoch
"""),
    "stream": _table("""
set_epoch dataset_epoch - epoch
"""),
    "generator": _table("""
manual_seed - self seed
"""),
    "parameters": {},
    "writer": _table("""
add_scalar log - tag scalar_value global_step
"""),
}
METHODS["logger"] = {**dict.fromkeys(_LEVELS.split(), _TOLD), "setLevel": Api("logging", "", ("level",))}
METHODS["ddp"] = METHODS["module"]
METHODS["parameter"] = METHODS["tensor"] | {"requires_grad_": METHODS["module"]["requires_grad_"]}


def speaks_of_ranks(name: str) -> frozenset[str]:
    """What something unknown is made of by its name alone: `is_main_process`, `is_global_zero`, `local_rank` of a
    library tell some ranks from others, and nothing under such a condition happens on all.

    >>> sorted(speaks_of_ranks("is_main_process")), sorted(speaks_of_ranks("domain"))
    (['partly'], [])
    """
    return frozenset({"partly"}) if _OF_RANKS.search(name.lower()) else frozenset()


_OF_RANKS = re.compile(
    r"(^|_)(is_?)?(main|master|chief|leader|primary|coordinator|root)(_?(process|rank|worker|node|proc))?$"
    r"|(^|_)(is_)?(global_|local_|world_)?(rank|zero)(_?(zero|0|only))?$"
    r"|(^|_)proc(ess)?_?(index|id)$"
)


def names_a_rank(name: str) -> bool:
    """Whether a variable has the name of one that tells ranks apart. More strict than `speaks_of_ranks`: scripts call
    their folders ``root``.

    >>> names_a_rank("local_rank"), names_a_rank("ranking")
    (True, False)
    """
    return _NAMED_AFTER_RANKS.search(name.lower()) is not None


_NAMED_AFTER_RANKS = re.compile(
    r"^_?(my_|node_|local_|global_|world_|process_)?rank$|^_?is_?(main|master|chief|rank_?(0|zero))(_?(process|rank))?$"
    r"|^_?(main|master)_?(process|rank)$"
)


def may_agree(name: str) -> bool:
    """Whether something unknown, by its name alone, may make its arguments the same on all ranks.

    >>> may_agree("reduce_tensor"), may_agree("gather_for_metrics"), may_agree("accuracy")
    (True, True, False)
    """
    return _OF_AGREEING.search(name.lower()) is not None


_OF_AGREEING = re.compile(r"reduce|gather|sync|broadcast|across|all_?mean|mean_all|distributed_(mean|sum|average)")


LAUNCHED = frozenset(LAUNCHER_VARIABLES)
"""Variables that a launcher sets."""

KEPT = words(
    "tqdm.tqdm tqdm.auto.tqdm tqdm.notebook.tqdm tqdm.std.tqdm rich.progress.track itertools.chain "
    "functools.lru_cache functools.cache functools.update_wrapper"
)
"""Calls that give what they are given, as far as this matters here."""

LIBRARIES = words(
    "torch torchvision torchaudio torchtext torchmetrics numpy random os sys math time json re pathlib itertools "
    "functools collections argparse logging builtins contextlib copy tempfile datetime tqdm pickle glob shutil typing "
    "dataclasses warnings wandb mlflow PIL cv2 sklearn scipy pandas matplotlib string abc enum inspect operator socket "
    "subprocess yaml einops timm safetensors tensorboardX random statistics signal gc platform hashlib uuid csv io"
)
"""Top packages whose functions do not wrap a model, shard a loader or reduce gradients behind one's back."""

_REWRITTEN = [
    (re.compile(pattern), new)
    for pattern, new in {
        r"torch\.utils\.data\.(distributed|dataloader|dataset|sampler)\.(?=[A-Z_a-z])": "torch.utils.data.",
        r"(torch\.nn\.parallel\.distributed|apex\.parallel)\.DistributedDataParallel": (
            "torch.nn.parallel.DistributedDataParallel"
        ),
        r"torch\.nn\.parallel\.(data_parallel\.)?DataParallel": "torch.nn.DataParallel",
        r"torch\.distributed\.distributed_c10d\.": "torch.distributed.",
        r"torch\.distributed\.nn\.(?!functional)(?=[a-z_]+$)": "torch.distributed.nn.functional.",
        r"torch\.cuda\.amp\.": "torch.amp.",
        r"torch\.nn\.modules\.\w+\.": "torch.nn.",
        r"torch\.nn\.parameter\.": "torch.nn.",
        r"torch\.optim\.\w+\.(?=[A-Z])(?<!lr_scheduler\.)(?<!swa_utils\.)": "torch.optim.",
        r"torch\.random\.": "torch.",
        r"torch\.nn\.utils\.clip_grad\.": "torch.nn.utils.",
        r"apex\.parallel\.convert_syncbn_model": "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
        r"torch\.multiprocessing\.spawn\.(?=[a-z_]+$)": "torch.multiprocessing.",
        r"multiprocessing\.(?=Process)": "torch.multiprocessing.",
        r"torch\.torch\.": "torch.",
        r"lightning\.(pytorch\.)?seed_everything": "pytorch_lightning.seed_everything",
    }.items()
]


@functools.lru_cache(maxsize=4096)
def canonical(name: str) -> str:
    """The one name of an API that can be imported from several places.

    >>> canonical("torch.utils.data.distributed.DistributedSampler")
    'torch.utils.data.DistributedSampler'
    """
    for pattern, new in _REWRITTEN:
        if match := pattern.match(name):
            name = new + name[match.end() :]
    return name


def api(name: str) -> Api | None:
    """What a call of that (canonical) name is; ``None``: nothing is known of it."""
    if (known := _FUNCTIONS.get(name)) is not None:
        return known
    parent, _, last = name.rpartition(".")
    is_class = last[:1].isupper()
    if parent == "torch.optim" and is_class:
        return Api("optimizer", "optimizer", ("params", "lr"))
    if parent == "torch.optim.lr_scheduler" and is_class:
        return Api("scheduler", "scheduler", _SCHEDULES.get(last, ("optimizer",)))
    if parent == "torch.nn" and is_class:
        return Api("module", "module")
    if parent.startswith("torchvision.datasets") and is_class:
        return Api("dataset", "dataset", ("root",))
    if parent.startswith(("torchvision.models", "timm.models")) or name in ("timm.create_model", "torch.hub.load"):
        return Api("", "module")
    return None


_SCHEDULES = {
    "OneCycleLR": ("optimizer", "max_lr", "total_steps", "epochs", "steps_per_epoch"),
    "CosineAnnealingLR": ("optimizer", "T_max", "eta_min"),
    "LambdaLR": ("optimizer", "lr_lambda"),
    "LinearLR": ("optimizer", "start_factor", "end_factor", "total_iters"),
    "PolynomialLR": ("optimizer", "total_iters", "power"),
    "SequentialLR": ("optimizer", "schedulers", "milestones"),
    "StepLR": ("optimizer", "step_size", "gamma"),
}
