"""The options of a running job: models, ranks and hosts, speculation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeinfer.config.option import Sections, opt, setting

CACHE_TYPES = ("auto", "f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
UNQUANTISED = ("f16", "f32", "bf16")  #: types of values that need no flash attention
_LEAST_AT_START = 60.0
AUTO = "auto"  #: as a model: the best that is there
NO_DRAFT = "none"  #: as a draft: none, though one comes along with the model


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which models, and how one process evaluates their layers."""

    model: str = opt("", "-m", "--model", kind="str",
                     help="Target model: a GGUF file, a Hugging Face folder for torch, "
                          "user/repo[:quant or :FILE.gguf] on the Hugging Face hub (without either "
                          "Q4_K_M, else Q8_0, else the first file; fetched once, by rank 0), or a "
                          "name that `pipeinfer models` lists; auto: smollm2 where it is "
                          "installed, else embedded; empty: embedded.")
    offline: bool = opt(False, "--offline", kind="flag", changes_tokens=False,
                        help="Read models of the hub from the local cache only (as "
                             "HF_HUB_OFFLINE=1 does).")
    draft_model: str = opt("", "-md", "--model-draft", kind="str", changes_tokens=False,
                           help="Draft model (as for -m, same vocabulary), or DFlash draft; none: "
                                "no draft [default: that of embedded or smollm2, else none].")
    mmproj: str = opt("", "-mm", "--mmproj", kind="str",
                      help="Projector of pictures or sound: a file; none: no pictures; empty: the "
                           "nearest mmproj*.gguf next to the model. See docs/images.md.")
    image_max_tokens: int = opt(0, "--image-max-tokens", low=0, high=1 << 16,
                                help="Most tokens of a picture; 0: 1024, of a Gemma 280. Fewer "
                                     "are computed faster.")
    image_min_tokens: int = opt(0, "--image-min-tokens", low=0, high=1 << 16,
                                help="Least tokens of a picture; 0: as the projector's file says.")
    mmproj_threads: int = opt(0, "--mmproj-threads", low=0, high=512, changes_tokens=False,
                              help="Threads of the projector; 0: all cores of rank 0's host.")
    backend: str = opt("auto", "--backend", kind="str",
                       choices=("auto", "llamacpp", "torch"),
                       help="Library that computes the target's layers; auto: torch for a Hugging "
                            "Face folder, llama.cpp for GGUF. See docs/torch.md.")
    device: str = opt("auto", "--device", kind="str",
                      help="Device that torch uses: cpu, cuda or cuda:N; auto: a GPU if torch "
                           "finds one, else the processor. (llama.cpp: see -ngl.)")
    dtype: str = opt("auto", "--dtype", kind="str",
                     choices=("auto", "float32", "bfloat16"),
                     help="Data type of torch's weights, cache and arithmetic; auto: float32 on "
                          "processors, bfloat16 on GPUs.")
    ctx: int = opt(0, "-c", "--ctx-size", low=0, high=2**24,
                   help="Context in tokens; 0: the model's own, at most 8192.")
    threads: int = opt(0, "-t", "--threads", low=0, high=512,
                       help="Threads per stage; 0: the host's cores, shared evenly among its "
                            "ranks.")
    threads_draft: int = opt(0, "-td", "--threads-draft", low=0, high=512, changes_tokens=False,
                             help="Threads of the draft; 0: as many as a stage.")
    gpu_layers: int = opt(0, "-ngl", "--n-gpu-layers", low=0, high=100_000,
                          help="Number of layers of a stage to put on its GPU.")
    gpu_layers_draft: int = opt(0, "-ngld", "--n-gpu-layers-draft", low=0,
                                high=100_000, changes_tokens=False,
                                help="Number of layers of the draft to put on the GPU.")
    cache_type_k: str = opt("auto", "-ctk", "--cache-type-k", kind="str",
                            choices=CACHE_TYPES,
                            help="Data type of the cached keys; auto: the one that keeps decodes "
                                 "exact (on a CPU q8_0, see docs/exactness.md).")
    cache_type_v: str = opt("auto", "-ctv", "--cache-type-v", kind="str",
                            choices=CACHE_TYPES,
                            help="Data type of the cached values; auto: the one that keeps "
                                 "decodes exact (on a CPU q8_0, see docs/exactness.md).")
    ubatch: int = setting(0, low=0, high=65536,
                          help="Maximum prompt rows of one decode; limits chunk.")
    flash_attn: str = opt("auto", "-fa", "--flash-attn", kind="str",
                          choices=("auto", "on", "off"), help="Flash attention.")
    repack: str = setting("auto", kind="str", choices=("auto", "on", "off"),
                          help="Convert quantised weights to a layout for faster kernels while "
                               "they are loaded; auto: unless llama.cpp was compiled for AMX, "
                               "where it would crash.")
    mlock: bool = opt(False, "--mlock", kind="flag", changes_tokens=False,
                      help="Lock the weights in memory.")
    mmap: bool = opt(True, "--mmap", kind="flag", off_flag="--no-mmap", changes_tokens=False,
                     help="Map the weights into memory instead of reading them.")
    huge_pages: bool = setting(True, kind="flag", changes_tokens=False,
                               help="Copy weights that are mapped in small pages into huge ones, "
                                    "which are read faster, while a tenth of the memory stays "
                                    "free.")
    numa: str = opt("", "--numa", kind="str",
                    choices=("", "distribute", "isolate", "numactl", "off"),
                    help="Sockets of a host: llama.cpp's strategies, or off. By default each rank "
                         "stays on one, with its memory, where there are as many ranks as "
                         "sockets.")
    like_llama_cpp: bool = setting(False, kind="flag",
                                   help="Use llama.cpp's defaults for cache types, flash "
                                        "attention, repacking and prompt chunks, which gives its "
                                        "tokens; few rows or none are exact together then.")
    exact: str = opt("on", "--exact", kind="str", choices=("on", "off"),
                     help="Limit runs to the width at which decodes are bit-equal to single rows.")
    pad: int = setting(0, low=0, high=16,
                       help="With -ngl and --exact on: rows to which each shorter decode is "
                            "padded; 1: none; 0: as many as promise most by the times of this "
                            "GPU. See docs/exactness.md.")


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Ranks and hosts: who holds what, what is measured, watched and recorded."""

    distribute: bool = opt(False, "--distribute", kind="flag", changes_tokens=False,
                           help="Send layers from rank 0 to ranks without the model file, which "
                                "store them; see docs/clusters.md.")
    shard_cache: str = setting("auto", kind="str", choices=("auto", "always", "never"),
                               changes_tokens=False,
                               help="Whether a rank writes its layers into a file of its own "
                                    "before it loads them; auto: where the model is on a network "
                                    "file system, or its layers are slices.")
    cancel_path: str = setting("auto", kind="str", choices=("auto", "direct", "backward"),
                               changes_tokens=False,
                               help="How cancellations travel: directly to every stage, or "
                                    "backward from stage to stage; auto: backward with --policy "
                                    "published.")
    head_stage: bool = opt(False, "--head-stage", kind="flag",
                           help="Give rank 0 the first layers, too.")
    keep_binding: bool = setting(False, kind="flag", changes_tokens=False,
                                 help="Keep the processor binding that the launcher set.")
    nodes: str = opt("", "--nodes", kind="str", changes_tokens=False,
                     help="TOML file with settings per host, see docs/clusters.md [default: with "
                          "launch/ssh, HOSTFILE.toml].")
    split: str = setting("planned", kind="str", choices=("planned", "equal"), changes_tokens=False,
                         help="Layers per stage: planned from each rank's measured speed, or "
                              "equal shares.")
    layers: str = opt("", "--layers", kind="str", changes_tokens=False,
                      help="Number of layers of each stage, such as 10,12,12,6; 0 leaves a rank "
                           "out.")
    grid: str = opt("", "--grid", kind="str",
                    help="Stages x members, such as 2x4, or members of each stage, such as 4,3; "
                         "auto: the fastest by measured ranks and links [default: one member a "
                         "stage]. See docs/wide.md.")
    slices: str = opt("", "--slices", kind="str",
                      help="Slices of each stage's layers, such as 4 or 4,2, or their shares, "
                           "such as 3:2:2 [default: one for each member]. Tokens are equal "
                           "for equal slices, whatever ranks hold them.")
    sum_type: str = opt("f32", "--sum-type", kind="str", choices=("f32", "f16", "bf16"),
                        help="Data type of the partial results that members exchange; shorter "
                             "ones save time on slow networks.")
    hidden_type: str = setting("f32", kind="str", choices=("f32", "f16"), changes_tokens=False,
                               help="Data type of the rows that stages send to a head of the "
                                    "model (--proposer mtp, eagle3, dflash); f16 saves time on "
                                    "slow networks.")
    sum_path: str = setting("auto", kind="str", choices=("auto", "memory", "messages"),
                            help="How members of a stage exchange partial results: through shared "
                                 "memory, or as messages; auto: memory where all are on one host.")
    slice_head: str = setting(
        "auto", kind="str", choices=("auto", "on", "off"), changes_tokens=False, help="Give the "
        "members of the only stage slices of a prediction head; auto: where that is faster.")
    remeasure: bool = setting(False, kind="flag", changes_tokens=False,
                              help="Measure the ranks again instead of using cached measurements.")
    strict: bool = opt(False, "--strict", kind="flag", changes_tokens=False,
                       help="Refuse ranks whose llama.cpp was compiled for other processors than "
                            "rank 0's: they may choose otherwise where two tokens are nearly "
                            "tied.")
    timeout: float = opt(300.0, "--timeout", kind="float", low=0.1, high=1e6, changes_tokens=False,
                         help="Seconds to wait for a message of another rank before the "
                              "job fails.")
    trace: str = opt("", "--trace", kind="str",
                     help="Write a Chrome trace (JSON) of every run to this file.")
    heartbeat: float = opt(2.0, "--heartbeat", kind="float", low=0, high=3600, changes_tokens=False,
                           help="Seconds of silence after which a hanging rank is killed and an "
                                "unreachable host counts as lost; 0 switches this off (for "
                                "debuggers).")
    turns: str = setting("auto", kind="str", choices=("auto", "off"),
                         help="auto: time sharing where all ranks are on one host; off, or with "
                              "-t: each keeps its share of the cores. See docs/clusters.md.")
    spares: int = opt(0, "--spares", low=0, high=1000, changes_tokens=False,
                      help="Number of ranks, counted from the last, that hold no layers until "
                           "they replace a rank that dies; see docs/chaos.md.")
    draft_ranks: int = opt(0, "--draft-ranks", low=0, high=1000, changes_tokens=False,
                           help="Give this number of drafts a rank each, counted from the last "
                                "one that is no spare; see docs/clusters.md.")
    kv_disk: str = opt("", "--kv-disk", kind="str", changes_tokens=False,
                       help="Keep the cells of prompts in this folder of each host, so that a "
                            "prompt is not computed again after a restart, a loss or a change of "
                            "the model; auto: below pipeinfer's cache folder. Prompts can be read "
                            "from it, see docs/security.md.")
    kv_disk_size: str = opt("16 GiB", "--kv-disk-size", kind="str", changes_tokens=False,
                            help="Size of that folder, from which on prompts that were used "
                                 "longest ago are removed.")
    kv_disk_days: float = setting(30.0, kind="float", low=0.01, high=1e5, changes_tokens=False,
                                  help="Days after which a prompt that was not used is removed "
                                       "from it.")
    rebalance: str = opt("auto", "--rebalance", kind="str",
                         choices=("auto", "off"), changes_tokens=False,
                         help="serve: redistribute the layers between requests when a stage has "
                              "become slow and at least 25 % more speed is expected.")
    hook: tuple[str, ...] = opt((), "--hook", kind="list", changes_tokens=False,
                                help="For experiments (repeatable). pace=MS or pace=MS+ROW_MS: "
                                     "each decode of a stage takes at least MS milliseconds, and "
                                     "ROW_MS more for each further row; fault=SPEC: cause a fault, "
                                     "such as fault=kill@2:decode=30 (see docs/chaos.md).")

    @property
    def start_timeout(self) -> float:
        """Seconds to wait for a rank that reports nothing yet: before its stage loads it may read
        libraries from a cold disk, and measure itself, on a busy host."""
        return max(self.timeout, _LEAST_AT_START)


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """What is guessed, issued and kept in the cache, for how many requests at a time."""

    policy: str = opt("", "--policy", kind="str",
                      choices=("", "iterative", "speculative", "pipeinfer", "published"),
                      changes_tokens=False,
                      help="How to decode: one token at a time, with synchronous or "
                           "asynchronous speculation, or by the rules of PipeInfer's paper "
                           "[default: pipeinfer if there is a proposer, else iterative].")
    proposer: tuple[str, ...] = opt((), "--proposer", kind="list", registered="proposers",
                                    changes_tokens=False,
                                    help="Source of speculative tokens (repeatable: used in the "
                                         "given order until one is nearly certain) [default: "
                                         "prompt lookup, then the draft].")
    decomposer: str = opt("", "--decomposer", kind="str", registered="decomposers",
                          help="Decode a response in several threads at once; see "
                               "docs/decomposers.md. The prompt becomes a chat message; the "
                               "default model is a small embedded one that was trained for this.")
    decompose_threads: int = setting(8, low=1, high=64,
                                     help="Maximum number of threads of a response that decode "
                                          "alongside its main one; further ones wait.")
    ablate: tuple[str, ...] = opt((), "--ablate", kind="list",
                                  choices=("async", "continuous", "multibuffer",
                                           "alternatives", "cancel"), changes_tokens=False,
                                  help="Switch off a component of pipeinfer, or of published "
                                       "(repeatable).")
    draft_max: int = setting(0, low=0, high=64, changes_tokens=False,
                             help="Maximum speculative tokens per micro-batch; 0: tuned while "
                                  "running, 3 with --policy published.")
    tree_max: int = setting(0, low=0, high=256, changes_tokens=False,
                            help="Drafted tokens of a synchronous tree (--policy speculative); 0: "
                                 "2 to 7, depending on what a further row costs here.")
    draft_p_min: float = setting(-1.0, kind="float", low=-1, high=1, changes_tokens=False,
                                 help="Do not issue drafted tokens below this confidence; -1: 0.4 "
                                      "for synchronous trees, 0.1 with --policy published, else "
                                      "only path_min applies.")
    path_min: float = setting(-1.0, kind="float", low=-1, high=2, changes_tokens=False,
                              help="Issue a speculative token only if it and all before it will "
                                   "be accepted with at least this estimated probability; -1: "
                                   "tuned while running, 0 with --policy published.")
    alternatives: int = setting(-1, low=-1, high=7, changes_tokens=False,
                                help="How many of the draft's second, third, ... choices may be "
                                     "issued along with its first; -1: 1, or 2 on long pipelines; "
                                       "of --policy pipeinfer alone.")
    adapt: bool = setting(True, kind="flag", changes_tokens=False,
                          help="Tune credit, micro-batch size, cutoff and tip while running.")
    p_split: float = setting(-1.0, kind="float", low=-1, high=1, changes_tokens=False,
                             help="Least confidence of a further branch or alternative; -1: 0.2 "
                                  "for synchronous trees, 0.1 with --policy published, else "
                                  "0.02.")
    p_recovery: float = setting(0.0, kind="float", low=0, high=1, changes_tokens=False,
                                help="Raise the cutoff by this much for each run issued since the "
                                     "last acceptance.")
    p_decay: float = setting(0.0, kind="float", low=0, high=1, changes_tokens=False,
                             help="Lower the cutoff of draft_p_min and p_recovery by this "
                                  "much for each empty draft since the last acceptance; without "
                                  "them it has no effect.")
    tip: str = setting("auto", kind="str", choices=("auto", "alone", "joined"),
                       changes_tokens=False,
                       help="After a miss, issue the accepted token alone at once, or joined with "
                            "the first speculative tokens after it; auto: tuned while running.")
    branches: int = setting(1, low=1, high=32, changes_tokens=False,
                            help="Paths of a tree of --policy speculative, or of a micro-batch of "
                                 "--policy published (1: a chain).")
    partitions: int = setting(-1, low=-1, high=200, changes_tokens=False,
                              help="Sequence ids for side branches; -1: twice the first credit, 8 "
                                   "to 60.")
    credit: int = setting(0, low=0, high=1024, changes_tokens=False,
                          help="Maximum number of useful runs in flight; 0: tuned while running, "
                               "from stages + 1, which --policy published keeps.")
    chunk: int = setting(64, low=1, high=4096,
                         help="Prompt tokens per run; prompts are cut at multiples of it.")
    parallel: int = opt(1, "-np", "--parallel", low=1, high=128, changes_tokens=False,
                        help="Requests decoded at the same time; others wait (serve: 16).")
    cache_tokens: int = setting(0, low=0, high=2**26, changes_tokens=False,
                                help="Tokens that the KV cache holds for all requests and stored "
                                     "prompts together; 0: the context, or twice that with "
                                     "--parallel.")
    prefix_cache: bool = setting(True, kind="flag", changes_tokens=False,
                                 help="Keep prompts of finished requests, so that a new request "
                                      "with the same beginning does not compute it again.")
    speculation: str = opt("auto", "--speculation", kind="str",
                           choices=("auto", "on", "off"), changes_tokens=False,
                           help="With several requests: speculate only where their own tokens "
                                "leave stages idle (auto), as much as for a single request "
                                "(on), or not at all (off).")

    #: values of strategies' own options by name; one that is not in it has its default
    own: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class JobConfig(Sections):
    """What a running job is made of.

    given: names of options that the command line gave; settings of single hosts leave those alone.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    given: frozenset[str] = frozenset()
