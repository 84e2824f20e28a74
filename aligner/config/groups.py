"""The groups of settings. A field's default lives here and nowhere else; the string below a field is its documentation."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Optional

from aligner.config.reward import RewardConfig as RewardConfig
from aligner.config.reward import RewardKind as RewardKind
from aligner.config.reward import RewardPlace as RewardPlace


class Dtype(Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class Resume(Enum):
    auto = "auto"
    never = "never"
    must = "must"


class Placement(Enum):
    refuse = "refuse"
    warn = "warn"


class Recompute(Enum):
    none = "none"
    full = "full"


class Schedule(Enum):
    constant = "constant"
    cosine = "cosine"
    linear = "linear"


class Overlong(Enum):
    drop = "drop"
    truncate = "truncate"
    refuse = "refuse"


class EngineKind(Enum):
    torch = "torch"
    trtllm = "trtllm"


class Certify(Enum):
    full = "full"
    sampled = "sampled"
    off = "off"


class ValueNormalisation(Enum):
    none = "none"
    popart = "popart"


class CriticPlace(Enum):
    auto = "auto"
    remote = "remote"
    local = "local"
    none = "none"


@dataclass
class RunConfig:
    name: str = "ppo"
    """Name of the run; its folder is `run.dir/run.name`. One live run a name: a lock holds it."""
    dir: str = "runs"
    """Folder that holds the runs, on a file system that both jobs see."""
    seed: int = 1234
    """Seed of data order, sampling and mini-batch shuffles."""
    max_steps: int = 100
    """Number of steps (passes of the loop), critic warm-up included."""
    resume: Resume = Resume.auto
    """auto: continue from the newest committed checkpoint where there is one; never: refuse a folder with checkpoints;
    must: refuse without one."""
    max_time: Optional[str] = None
    """How long this job may run, set-up included, as D-HH:MM:SS, HH:MM:SS or a number of seconds (the scheduler's limit, say). It saves a
    pair and ends with exit code 85, to be started again, while one more step and a save would not fit; absent: no limit."""
    max_time_margin: float = 60.0
    """Seconds that are kept of run.max_time at the least; more are, where the longest step and the longest save so far took more."""


@dataclass
class ParallelConfig:
    tensor: int = 1
    """Tensor-parallel degree."""
    pipeline: int = 1
    """Pipeline-parallel degree. Data-parallel is the rest: world / (tensor * pipeline)."""
    virtual_pipeline: Optional[int] = None
    """Model chunks a pipeline rank (interleaved schedule); needs pipeline > 1."""
    sequence: bool = False
    """Sequence parallelism; needs tensor > 1."""
    threads: int = 0
    """CPU threads a rank; 0 takes OMP_NUM_THREADS where it is set, else divides the cores of this host between the ranks on it (a 1
    under torchrun with several ranks is torchrun's own default and does not count)."""
    training_threads: int = 0
    """CPU threads a rank while it trains; 0: parallel.threads. Actor and critic train at the same time: jobs that share a host
    should share its cores then, and launch/local/ppo.py divides them between all ranks of both."""
    timeout: float = 2400.0
    """Deadline of every collective, in seconds."""
    placement: Placement = Placement.refuse
    """Where ranks of a tensor-parallel group, or of a group that shares an engine, are on several nodes: refuse to start, or warn."""
    probe: bool = True
    """Measure latency and bandwidth of the tensor, pipeline and data groups and of the world at the start; takes less than a second
    where the network is well, and a slow group is told."""
    probe_mb: Optional[float] = None
    """MB that the bandwidth is measured with; absent: 16 on a GPU, 1 on a CPU."""


@dataclass
class ModelConfig:
    checkpoint: str = "???"
    """Folder of a converted checkpoint (model_config.yaml, model_weights/, tokenizer/) or a .nemo archive of one."""
    dtype: Dtype = Dtype.auto
    """Compute type; master weights are float32. auto: bfloat16 on a GPU; on a CPU whichever a micro-timing finds faster."""
    recompute: Recompute = Recompute.none
    """full: activations of each layer are recomputed in the backward pass."""
    num_layers: Optional[int] = None
    """Keep only the first layers of the checkpoint (a smaller critic from the same backbone); absent: all of them."""


@dataclass
class OptimConfig:
    lr: float = 1e-6
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of a cosine or linear schedule."""
    schedule: Schedule = Schedule.constant
    """Shape of the learning rate after warm-up."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    decay_steps: int = 0
    """Optimizer steps until min_lr; required by cosine and linear."""
    beta1: float = 0.9
    """Adam's first beta."""
    beta2: float = 0.95
    """Adam's second beta."""
    eps: float = 1e-8
    """Adam's epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay (not applied to norms and biases)."""
    clip_grad: float = 1.0
    """Gradient norm over all parameters is clipped to this; 0 does not clip."""
    distributed: bool = False
    """Shard optimizer states over the data-parallel ranks (ZeRO-1)."""
    cpu_offload: bool = False
    """Keep optimizer states and their update on the host (megatron-core's hybrid optimizer)."""
    offload_during_generation: bool = False
    """Move optimizer states to the host while the engine generates."""


@dataclass
class DataConfig:
    prompts: Optional[str] = None
    """JSONL file of prompts to train on: `prompt` (text) or `messages`; further fields go to the verifier."""
    validation_prompts: Optional[str] = None
    """JSONL file of held-out prompts; required with data.prompts where validation.every > 0."""
    task: Optional[str] = None
    """Name of a reasoning-gym task to draw prompts from; instead of data.prompts."""
    task_config: dict[str, Any] = field(default_factory=dict)
    """Settings of the reasoning-gym task."""
    task_size: int = 2000
    """Draws from the task; equal problems are kept once."""
    task_key: str = "question"
    """What makes two problems the same for the split: question, or operands (the unordered numbers of the question)."""
    holdout: float = 0.3
    """Share of distinct task keys, chosen by their hash, that is held out for validation."""
    template: str = "{prompt}"
    """Text around a task's question or a `prompt` field; {prompt} and {question} stand for it, {expression} for the bare
    expression of an arithmetic task."""
    chat: bool = True
    """Apply the tokenizer's chat template with a generation prompt; false: the text as it is."""
    system: Optional[str] = None
    """System message put before prompts that have none; absent: the chat template's own default."""
    overlong: Overlong = Overlong.drop
    """What happens to a prompt longer than engine.max_input_len tokens; drops and cuts are counted."""
    shuffle: bool = True
    """Shuffle prompts anew each epoch, from run.seed alone."""


@dataclass
class SamplingConfig:
    temperature: float = 1.0
    """Sampling temperature; log-probs are those of the tempered distribution."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Further token ids that end a response, beside the tokenizer's end tokens."""
    stop_strings: list[str] = field(default_factory=list)
    """Texts that end a response with the whole token that completes one; scored and shown text ends with the stop string."""
    top_k: int = 0
    """Sample from this many likeliest tokens; 0: all. Refused in training, as is every setting below."""
    top_p: float = 1.0
    """Sample from the fewest likeliest tokens whose probabilities reach this share; 1: all."""
    min_p: float = 0.0
    """Sample from tokens of at least this share of the likeliest one's probability; 0: all."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens that prompt or response hold; 1: none."""
    min_output_len: int = 0
    """Stop tokens are impossible before this many tokens."""


@dataclass
class EngineConfig:
    kind: EngineKind = EngineKind.torch
    """torch: the embedded engine, on CPU or GPU; trtllm: TensorRT-LLM (docs/tensorrt-llm.md)."""
    tensor: Optional[int] = None
    """Consecutive ranks of one node that share a TensorRT-LLM engine, its tensor parallelism; absent: parallel.tensor."""
    max_batch_size: int = 64
    """Sequences an engine decodes at once; fixed at build."""
    max_input_len: int = 512
    """Longest prompt in tokens; fixed at build, longer ones are refused."""
    max_output_len: int = 512
    """Longest response in tokens, and the length at which responses are cut; fixed at build."""
    dtype: Dtype = Dtype.auto
    """Type of the engine's weights and cache; auto: model.dtype."""
    threads: int = 0
    """CPU threads a rank while it generates and validates; 0: parallel.threads."""
    native: bool = True
    """torch engine on a CPU: compile its kernels with the C compiler at hand, where they are the fastest; false: torch's own."""
    offload_during_training: bool = False
    """Give the engine's KV cache and weights back while the policy trains."""
    memory_fraction: float = 0.4
    """Share of the free GPU memory that TensorRT-LLM takes for its KV cache."""
    timeout: float = 1200.0
    """Deadline of each call to TensorRT-LLM (start, a bucket of weights, giving memory back ...), in seconds."""


@dataclass
class RefitConfig:
    certify: Certify = Certify.sampled
    """Checksums that prove the engine holds the policy's weights: of every tensor, of a sample, or none."""
    sync_every: int = 1
    """Policy updates (steps that train) between refits. Above 1 the engine samples from older weights, which ppo.importance_cap has to
    correct. Before a validation and after a checkpoint the engine is refitted all the same."""
    bucket_mb: int = 512
    """Weights that are sent to TensorRT-LLM at once, in MB: copies of them are held on each GPU meanwhile."""


@dataclass
class CriticClientConfig:
    place: CriticPlace = CriticPlace.auto
    """remote: a critic job; local: in this process (one rank); none: no critic, and no critic job. auto: remote for ppo.advantage=gae,
    none for the critic-free ones."""
    endpoint: Optional[str] = None
    """host:port of the critic job; absent: read from the run's endpoints/critic.json."""
    connect_timeout: float = 600.0
    """Seconds to wait for the critic job's endpoint file and its first answer (10 where endpoint is given)."""
    request_timeout: float = 1800.0
    """Deadline of one request, in seconds."""
    reconnect_timeout: float = 600.0
    """Seconds to wait for a critic job that was lost to come back (at another host, port and grid if need be) before the actor job
    ends; 0: do not wait. parallel.timeout must cover this and critic.request_timeout."""
    heartbeat: float = 5.0
    """Seconds between the actor job's signs of life, by which it also sees that the critic job was lost or has come back."""
    infer_batch_size: int = 16
    """Rows an inference request: finished responses are sent in chunks of this size while others generate."""
    local_config: str = "ppo_critic"
    """For place local: the critic job's configuration in conf/."""
    local_overrides: list[str] = field(default_factory=list)
    """For place local: overrides of that configuration."""

    @property
    def patience(self) -> float:
        """Seconds after which a request was answered or has failed, a critic job that died and came back meanwhile included."""
        return self.request_timeout + self.reconnect_timeout


@dataclass
class CriticTrainConfig:
    mini_batch_size: int = 128
    """Rows an optimizer step."""
    micro_batch_size: int = 4
    """Rows a forward pass on one data-parallel rank."""
    micro_batch_tokens: Optional[int] = None
    """Tokens a forward pass on one data-parallel rank, padding included, instead of critic.micro_batch_size rows. Absent: rows count."""
    epochs: int = 1
    """Passes over a train request."""
    value_clip: Optional[float] = 0.2
    """New values are clipped to the old ones +- value_clip in the loss (in deviations of the returns where values are normalised);
    absent: not clipped."""
    value_normalisation: ValueNormalisation = ValueNormalisation.none
    """popart: the head learns returns of mean 0 and deviation about 1, and is rescaled so that values keep their meaning while these
    statistics move (van Hasselt et al. 2016); none: returns as they are."""
    value_normalisation_rate: float = 0.1
    """Weight of a step's returns in the moving average of their mean and square."""
    head_lr_multiplier: float = 1.0
    """Learning rate of the value head over that of the backbone."""
    fresh_head: bool = False
    """Start with a value head of zeros even where model.checkpoint, a reward model or a critic, has a head; false: it is carried over,
    and of several attributes what they add up to."""


@dataclass
class ServingConfig:
    bind: str = "auto"
    """What to bind: auto (loopback outside Slurm, the node's address in a Slurm step), an address, or a network interface (ib0)."""
    port: int = 0
    """HTTP port; 0 takes a free one and writes it to the endpoint file."""
    advertise_host: Optional[str] = None
    """Host name that the endpoint file names; absent: the bound address."""
    token_file: Optional[str] = None
    """File (mode 0600) with the access token; generated in the run folder where the bind is not loopback."""
    deterministic: bool = False
    """Requests one by one in sample order, fixed micro-batch shapes: bit-equal answers on the same grid."""
    queue_delay_us: int = 2000
    """How long the batcher waits to merge requests, in microseconds."""
    heartbeat: float = 5.0
    """Seconds between no-op broadcasts to the other ranks while idle."""
    idle_timeout: float = 1800.0
    """A critic job that no actor spoke to for this long ends, in seconds."""
    silence: float = 60.0
    """An actor job that says nothing for this long counts as gone, in seconds: it is told in the log, and a critic job that was told
    to end does not wait for it."""
    drain_timeout: float = 25.0
    """Seconds that a critic job which was told to end (SIGTERM, SIGUSR1) serves on, so that the actor saves a pair at its step's end; a
    scheduler's grace should be longer. 0: it ends at once, and the actor brings its successor back in step from the journal."""
    max_rows: int = 1024
    """Rows of one inference batch at most."""
    metrics_port: Optional[int] = None
    """Port of Prometheus metrics (GET /metrics) on the server's address, without a token; 0 takes a free one and writes it to the
    endpoint file; absent: no metrics."""


@dataclass
class CheckpointConfig:
    every: int = 50
    """Steps between checkpoints; 0 saves at the end only."""
    keep_last: int = 2
    """Newest checkpoints to keep."""
    keep_best: bool = True
    """Also keep the checkpoint with the best validation."""
    at_end: bool = True
    """Save after the last step."""
    asynchronous: bool = False
    """Training waits only until what a pair holds is copied (which takes as much host memory again), and the pair is written meanwhile and
    committed at the end of a later step. Where the critic job dies before, that pair is given up and the one before stays."""


@dataclass
class ValidationConfig:
    every: int = 10
    """Steps between validations; 0 never. The first is before training."""
    max_prompts: int = 256
    """Held-out prompts, the same at each validation."""
    temperature: float = 0.0
    """Sampling temperature of validation; 0 is greedy."""
    top_k: int = 0
    """As sampling.top_k, for validation."""
    top_p: float = 1.0
    """As sampling.top_p, for validation."""
    min_p: float = 0.0
    """As sampling.min_p, for validation."""
    repetition_penalty: float = 1.0
    """As sampling.repetition_penalty, for validation."""
    min_output_len: int = 0
    """As sampling.min_output_len, for validation."""


@dataclass
class LoggingConfig:
    tensorboard: bool = True
    """Write TensorBoard event files."""
    wandb_project: Optional[str] = None
    """Weights & Biases project; absent: not logged there."""
    rollouts: bool = True
    """Write every sample to rollouts/step_N.jsonl."""
    drift_alarm: float = 0.5
    """Warn where the mean absolute difference between engine and trainer log-probs exceeds this."""
