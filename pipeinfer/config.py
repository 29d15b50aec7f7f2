"""Every option, declared once, in sections: its flags, type, bounds, default and help.

A function takes the section that it needs. `JobConfig` joins the three that a running job is made
of, `Config` all of them. This module knows no model, rank or click command; `cli.options` turns the
declarations into options and finds out where each value came from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self

from pipeinfer.errors import UsageError

CACHE_TYPES = ("auto", "f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
UNQUANTISED = ("f16", "f32", "bf16")  #: types of values that need no flash attention
AUTO = "auto"  #: as a model: the best that is there
NO_DRAFT = "none"  #: as a draft: none, though one comes along with the model
#: What `--help` shows; `--help-all` shows the rest, too.
BASIC = frozenset((
    "model", "hf_repo", "draft_model", "ctx", "threads", "gpu_layers", "policy", "proposer",
    "parallel", "nodes", "head_stage", "temp", "top_k", "top_p", "seed", "json_schema", "prompt",
    "file", "n_predict", "chat", "stop", "host", "port", "api_key_file"))


@dataclass(frozen=True, slots=True)
class Option:
    """How one field is given.

    kind: int, float, str, flag or list. registered: what kind of strategies its choices are.
    secret: never shown.
    """

    flags: tuple[str, ...]
    kind: str
    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    off_flag: str | None = None
    secret: bool = False
    registered: str = ""


@dataclass(frozen=True, slots=True)
class OwnOption:
    """An option of one strategy, declared beside it."""

    default: Any
    option: Option


def _opt(default: Any, *flags: str, kind: str = "int", help: str, **extra: Any) -> Any:
    return field(default=default, metadata={"option": Option(flags, kind, help, **extra)})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which models, and how one process evaluates their layers."""

    model: str = _opt("", "-m", "--model", kind="str",
                      help="Target model: a GGUF file, a Hugging Face folder for torch, "
                           "user/repo[:quant] on the Hugging Face hub, or a name that `pipeinfer "
                           "models` lists; auto: smollm2 where it is installed, else embedded; "
                           "empty: embedded.")
    hf_repo: str = _opt("", "-hf", "-hfr", "--hf-repo", kind="str",
                        help="Target model on the Hugging Face hub, user/repo[:quant]; without a "
                             "quantisation Q4_K_M, else Q8_0, else the first file. Fetched once, "
                             "by rank 0.")
    hf_file: str = _opt("", "-hff", "--hf-file", kind="str",
                        help="With -hf: this file of the repository.")
    hf_repo_draft: str = _opt("", "-hfd", "-hfrd", "--hf-repo-draft", kind="str",
                              help="Draft model on the hub, as for -hf.")
    offline: bool = _opt(False, "--offline", kind="flag",
                         help="Read models of the hub from the local cache only (as "
                              "HF_HUB_OFFLINE=1 does).")
    draft_model: str = _opt("", "-md", "--model-draft", kind="str",
                            help="Draft model (as for -m, same vocabulary); none: no draft "
                                 "[default: the one that comes with embedded or smollm2, "
                                 "else none].")
    backend: str = _opt("auto", "--backend", kind="str",
                        choices=("auto", "llamacpp", "torch"),
                        help="Library that computes the target's layers; auto: torch for a Hugging "
                             "Face folder, llama.cpp for GGUF. See docs/torch.md.")
    device: str = _opt("auto", "--device", kind="str",
                       help="Device that torch uses: cpu, cuda or cuda:N; auto: a GPU if torch "
                            "finds one, else the processor. (llama.cpp: see -ngl.)")
    dtype: str = _opt("auto", "--dtype", kind="str",
                      choices=("auto", "float32", "bfloat16"),
                      help="Data type of torch's weights, cache and arithmetic; auto: float32 on "
                           "processors, bfloat16 on GPUs.")
    draft_small: str = _opt("", "-mds", "--model-draft-small", kind="str",
                            help="A second, smaller draft model, which drafts first; where its "
                                 "confidence is low, the larger one drafts.")
    ctx: int = _opt(0, "-c", "--ctx-size", low=0, high=2**24,
                    help="Context in tokens; 0: the model's own, at most 8192.")
    threads: int = _opt(0, "-t", "--threads", low=0, high=512,
                        help="Threads per stage; 0: the host's cores, shared evenly among its "
                             "ranks.")
    threads_draft: int = _opt(0, "-td", "--threads-draft", low=0, high=512,
                              help="Threads of the draft; 0: as many as a stage.")
    gpu_layers: int = _opt(0, "-ngl", "--n-gpu-layers", low=0, high=100_000,
                           help="Number of layers of a stage to put on its GPU.")
    gpu_layers_draft: int = _opt(0, "-ngld", "--n-gpu-layers-draft", low=0,
                                 high=100_000,
                                 help="Number of layers of the draft to put on the GPU.")
    cache_type_k: str = _opt("auto", "-ctk", "--cache-type-k", kind="str",
                             choices=CACHE_TYPES,
                             help="Data type of the cached keys; auto: the one that keeps decodes "
                                  "exact (on a CPU q8_0, see docs/exactness.md).")
    cache_type_v: str = _opt("auto", "-ctv", "--cache-type-v", kind="str",
                             choices=CACHE_TYPES,
                             help="Data type of the cached values; auto: the one that keeps "
                                  "decodes exact (on a CPU q8_0, see docs/exactness.md).")
    ubatch: int = _opt(0, "-ub", "--ubatch-size", low=0, high=65536,
                       help="Maximum prompt rows of one decode; limits --chunk.")
    flash_attn: str = _opt("auto", "-fa", "--flash-attn", kind="str",
                           choices=("auto", "on", "off"), help="Flash attention.")
    repack: str = _opt("auto", "--repack", kind="str", choices=("auto", "on", "off"),
                       help="Convert quantised weights to a layout for faster kernels while "
                            "they are loaded; auto: unless llama.cpp was compiled for AMX, where "
                            "it would crash.")
    mlock: bool = _opt(False, "--mlock", kind="flag",
                       help="Lock the weights in memory.")
    mmap: bool = _opt(True, "--mmap", kind="flag", off_flag="--no-mmap",
                      help="Map the weights into memory instead of reading them.")
    huge_pages: bool = _opt(True, "--huge-pages", kind="flag", off_flag="--no-huge-pages",
                            help="Copy weights that are mapped in small pages into huge ones, "
                                 "which are read faster, while a tenth of the memory stays free.")
    numa: str = _opt("", "--numa", kind="str",
                     choices=("", "distribute", "isolate", "numactl"), help="NUMA strategy.")
    like_llama_cpp: bool = _opt(
        False, "--like-llama-cpp", kind="flag",
        help="Use llama.cpp's defaults for cache types, flash attention, repacking and prompt "
             "chunks, which gives its tokens; few rows or none are exact together then.")
    exact: str = _opt("on", "--exact", kind="str", choices=("on", "off"),
                      help="Limit runs to the width at which decodes are bit-equal to single rows.")

    def __post_init__(self) -> None:
        if self.hf_repo and self.model not in ("", AUTO):
            raise UsageError("-m and -hf both name the target: give only one of them")
        if self.hf_repo_draft and self.draft_model:
            raise UsageError("-md and -hfd both name the draft: give only one of them")
        if self.hf_file and not self.hf_repo:
            raise UsageError("-hff names a file of a repository: add -hf user/repo")
        kind = self.cache_type_v
        if self.flash_attn == "off" and kind not in ("auto", *UNQUANTISED):
            raise UsageError(f"-ctv {kind} needs flash attention: leave out -fa off")
        if self.like_llama_cpp and (self.exact == "off" or self.cache_type_k != "auto"
                                    or self.cache_type_v != "auto" or self.flash_attn != "auto"):
            raise UsageError("--like-llama-cpp decides cache types and flash attention itself: "
                             "leave out -ctk, -ctv, -fa and --exact off")


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Ranks and hosts: who holds what, what is measured, watched and recorded."""

    distribute: bool = _opt(False, "--distribute", kind="flag",
                            help="Send layers from rank 0 to ranks without the model file, which "
                                 "store them; see docs/clusters.md.")
    pace_ms: float = _opt(0.0, "--pace-ms", kind="float", low=0, high=60_000,
                          help="For experiments: make every decode of a stage take at least this "
                               "many milliseconds, as on a slower machine.")
    pace_row_ms: float = _opt(0.0, "--pace-row-ms", kind="float", low=0,
                              high=60_000,
                              help="With --pace-ms: milliseconds to add for each further row of a "
                                   "decode.")
    cancel_path: str = _opt("auto", "--cancel-path", kind="str",
                            choices=("auto", "direct", "backward"),
                            help="How cancellations travel: directly to every stage, or backward "
                                 "from stage to stage; auto: backward with --policy published.")
    head_stage: bool = _opt(False, "--head-stage", kind="flag",
                            help="Give rank 0 the first layers, too.")
    keep_binding: bool = _opt(False, "--keep-binding", kind="flag",
                              help="Keep the processor binding that the launcher set.")
    nodes: str = _opt("", "--nodes", kind="str",
                      help="TOML file with settings per host, see docs/clusters.md [default: with "
                           "launch/ssh, the one beside the hostfile].")
    split: str = _opt("planned", "--split", kind="str",
                      choices=("planned", "equal"),
                      help="Layers per stage: planned from each rank's measured speed, or equal "
                           "shares.")
    layers: str = _opt("", "--layers", kind="str",
                       help="Number of layers of each stage, such as 10,12,12,6; 0 leaves a rank "
                            "out.")
    grid: str = _opt("", "--grid", kind="str",
                     help="Stages x members, such as 2x4, or members of each stage, such as 4,3: "
                          "the members of a stage share its layers as slices; auto: what is "
                          "fastest by the measured ranks and links [default: one member a stage].")
    slices: str = _opt("", "--slices", kind="str",
                       help="Slices of each stage's layers, such as 4 or 4,2, or their shares, "
                            "such as 3:2:2 [default: one for each member]. Tokens are equal "
                            "for equal slices, whatever ranks hold them.")
    sum_type: str = _opt("f32", "--sum-type", kind="str", choices=("f32", "f16", "bf16"),
                         help="Data type of the partial results that members exchange; shorter "
                              "ones save time on slow networks.")
    sum_path: str = _opt("auto", "--sum-path", kind="str", choices=("auto", "memory", "messages"),
                         help="How members of a stage exchange partial results: through shared "
                              "memory, or as messages; auto: memory where all are on one host.")
    remeasure: bool = _opt(False, "--remeasure", kind="flag",
                           help="Measure the ranks again instead of using cached measurements.")
    strict: bool = _opt(False, "--strict", kind="flag",
                        help="Refuse ranks whose llama.cpp was compiled for other processors than "
                             "rank 0's: they may choose otherwise where two tokens are nearly "
                             "tied.")
    timeout: float = _opt(300.0, "--timeout", kind="float", low=0.1, high=1e6,
                          help="Seconds to wait for a message of another rank before the "
                               "job fails.")
    trace: str = _opt("", "--trace", kind="str",
                      help="Write a Chrome trace (JSON) of every run to this file.")
    heartbeat: float = _opt(2.0, "--heartbeat", kind="float", low=0, high=3600,
                            help="Seconds of silence after which a hanging rank is killed and an "
                                 "unreachable host counts as lost; 0 switches this off (for "
                                 "debuggers).")
    turns: str = _opt("auto", "--turns", kind="str", choices=("auto", "off"),
                      help="auto: where all ranks are on one host, draft and stages take turns, "
                           "each with all of its cores; off, or with -t: each keeps its share of "
                           "them, and runs overlap as over hosts. See docs/clusters.md.")
    spares: int = _opt(0, "--spares", low=0, high=1000,
                       help="Number of ranks, counted from the last, that hold no layers until "
                            "they replace a rank that dies; see docs/chaos.md.")
    draft_ranks: int = _opt(0, "--draft-ranks", low=0, high=1000,
                            help="Number of ranks, counted from the last one that is no spare, "
                                 "that share the draft and hold no layers of the target; see "
                                 "docs/clusters.md.")
    rebalance: str = _opt("auto", "--rebalance", kind="str",
                          choices=("auto", "off"),
                          help="serve: redistribute the layers between requests when a stage has "
                               "become slow and at least 25 % more speed is expected.")
    debug: bool = _opt(False, "--debug", kind="flag",
                       help="Check the scheduler's state after every event, and end the job if it "
                            "is inconsistent.")
    fault: tuple[str, ...] = _opt((), "--fault", kind="list",
                                  help="For experiments: cause a fault on purpose, such as "
                                       "kill@2:decode=30 (repeatable; see docs/chaos.md).")


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """What is guessed, issued and kept in the cache, for how many requests at a time."""

    policy: str = _opt("", "--policy", kind="str",
                       choices=("", "iterative", "speculative", "pipeinfer", "published"),
                       help="How to decode: one token at a time, with synchronous or with "
                            "asynchronous speculation, or by the rules of PipeInfer's paper, for "
                            "comparison [default: pipeinfer if there is a proposer, else "
                            "iterative].")
    proposer: tuple[str, ...] = _opt((), "--proposer", kind="list", registered="proposers",
                                     help="Source of speculative tokens (repeatable: used in the "
                                          "given order until one is nearly certain) [default: "
                                          "prompt lookup, then the draft].")
    layout: str = _opt("pipeline", "--layout", kind="str", choices=("pipeline", "replicate"),
                       help="pipeline: each rank holds some layers; replicate: each holds the "
                            "whole model and computes a share of the rows of lookahead decoding "
                            "(docs/lookahead.md).")
    decomposer: str = _opt("", "--decomposer", kind="str", registered="decomposers",
                           help="Decode a response in several threads at once; see "
                                "docs/decomposers.md. The prompt becomes a chat message; the "
                                "default model is a small embedded one that was trained for this.")
    decompose_threads: int = _opt(8, "--decompose-threads", low=1, high=64,
                                  help="Maximum number of threads of a response that decode "
                                       "alongside its main one; further ones wait.")
    ablate: tuple[str, ...] = _opt((), "--ablate", kind="list",
                                   choices=("async", "continuous", "multibuffer",
                                            "alternatives", "cancel"),
                                   help="Switch off a component of pipeinfer, or of published "
                                        "(repeatable).")
    draft_max: int = _opt(0, "--draft-max", "--draft", low=0, high=64,
                          help="Maximum speculative tokens per micro-batch; 0: tuned while "
                               "running.")
    tree_max: int = _opt(0, "--tree-max", low=0, high=256,
                         help="Drafted tokens of a synchronous tree (--policy speculative); 0: 2 "
                              "to 7, depending on what a further row costs here.")
    draft_p_min: float = _opt(-1.0, "--draft-p-min", kind="float", low=-1, high=1,
                              help="Do not issue drafted tokens below this confidence; -1: 0.4 for "
                                   "synchronous trees, else only --path-min applies.")
    path_min: float = _opt(-1.0, "--path-min", kind="float", low=-1, high=2,
                           help="Issue a speculative token only if it and all before it will be "
                                "accepted with at least this estimated probability; -1: tuned "
                                "while running.")
    alternatives: int = _opt(-1, "--alternatives", low=-1, high=7,
                             help="How many of the draft's second, third, ... choices may be "
                                  "issued along with its first; -1: 1, or 2 on long pipelines.")
    adapt: bool = _opt(True, "--adapt", kind="flag", off_flag="--no-adapt",
                       help="Tune credit, micro-batch size, cutoff and tip while running.")
    p_split: float = _opt(-1.0, "--p-split", kind="float", low=-1, high=1,
                          help="Least confidence of a further branch or alternative; -1: 0.2 for "
                               "synchronous trees, else 0.02.")
    p_recovery: float = _opt(0.0, "--p-recovery", kind="float", low=0, high=1,
                             help="Raise the cutoff by this much for each run issued since the "
                                  "last acceptance.")
    p_decay: float = _opt(0.0, "--p-decay", kind="float", low=0, high=1,
                          help="Lower the cutoff of --draft-p-min and --p-recovery by this much "
                               "for each empty draft since the last acceptance; without them it "
                               "has no effect.")
    tip: str = _opt("auto", "--tip", kind="str",
                    choices=("auto", "alone", "joined"),
                    help="After a miss, issue the accepted token alone at once, or joined with the "
                         "first speculative tokens after it; auto: tuned while running.")
    branches: int = _opt(1, "--branches", low=1, high=32,
                         help="Paths of a synchronous tree (1: a chain).")
    partitions: int = _opt(-1, "--partitions", low=-1, high=200,
                           help="Sequence ids for side branches; -1: twice the first credit, 8 to "
                                "60.")
    credit: int = _opt(0, "--credit", low=0, high=1024,
                       help="Maximum number of useful runs in flight; 0: tuned while running, from "
                            "stages + 1.")
    chunk: int = _opt(64, "--chunk", low=1, high=4096,
                      help="Prompt tokens per run; prompts are cut at multiples of it.")
    parallel: int = _opt(1, "-np", "--parallel", low=1, high=128,
                         help="Requests decoded at the same time; others wait (serve: 16).")
    cache_tokens: int = _opt(0, "--cache-tokens", low=0, high=2**26,
                             help="Tokens that the KV cache holds for all requests and stored "
                                  "prompts together; 0: the context, or twice that with "
                                  "--parallel.")
    prefix_cache: bool = _opt(True, "--prefix-cache", kind="flag",
                              off_flag="--no-prefix-cache",
                              help="Keep prompts of finished requests, so that a new request with "
                                   "the same beginning does not compute it again.")
    speculation: str = _opt("auto", "--speculation", kind="str",
                            choices=("auto", "on", "off"),
                            help="With several requests: speculate only where their own tokens "
                                 "leave room in the runs (auto), as much as for a single request "
                                 "(on), or not at all (off).")

    #: values of strategies' own options by name; one that is not in it has its default
    own: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How the target chooses a token."""

    temp: float = _opt(0.8, "--temp", kind="float", low=0, high=100,
                       help="Temperature; 0: always the likeliest token.")
    top_k: int = _opt(40, "--top-k", low=0, high=10**7,
                      help="Keep the k likeliest tokens; 0: all.")
    top_p: float = _opt(0.95, "--top-p", kind="float", low=0, high=1,
                        help="Keep the likeliest tokens whose probabilities add up to this; "
                             "1: all.")
    min_p: float = _opt(0.05, "--min-p", kind="float", low=0, high=1,
                        help="Keep tokens at least this likely relative to the likeliest.")
    repeat_penalty: float = _opt(1.0, "--repeat-penalty", kind="float",
                                 low=0.01, high=100,
                                 help="Divide the logits of repeated tokens by this.")
    presence_penalty: float = _opt(0.0, "--presence-penalty", kind="float",
                                   low=-100, high=100,
                                   help="Subtract this from the logits of repeated tokens.")
    frequency_penalty: float = _opt(0.0, "--frequency-penalty", kind="float",
                                    low=-100, high=100,
                                    help="Subtract this from a token's logit for each repetition.")
    repeat_last_n: int = _opt(64, "--repeat-last-n", low=-1, high=2**24,
                              help="How many last tokens count for penalties; 0: none, -1: all.")
    logit_bias: tuple[str, ...] = _opt((), "-l", "--logit-bias", kind="list",
                                       help="TOKEN_ID(+|-)BIAS, such as 15043+1, is added to a "
                                            "token's logit (repeatable).")
    grammar: str = _opt("", "--grammar", kind="str",
                        help="Grammar (GBNF) that the text has to follow.")
    grammar_file: str = _opt("", "--grammar-file", kind="str",
                             help="File with the grammar.")
    json_schema: str = _opt("", "-j", "--json-schema", kind="str",
                            help="JSON schema that the text has to follow; {} for any JSON.")
    seed: int = _opt(-1, "-s", "--seed", low=-1, high=2**63 - 1,
                     help="Random seed; -1: choose one and report it.")


@dataclass(frozen=True, slots=True)
class RequestConfig:
    """One prompt on the command line, and how its answer is printed."""

    prompt: str = _opt("", "-p", "--prompt", kind="str", help="Prompt text.")
    file: str = _opt("", "-f", "--file", kind="str",
                     help="File with the prompt; -: standard input.")
    n_predict: int = _opt(128, "-n", "--n-predict", "--predict", low=0,
                          high=2**24, help="Maximum number of tokens to generate.")
    chat: bool = _opt(False, "--chat", kind="flag",
                      help="Put the prompt into the model's chat template.")
    special: bool = _opt(False, "--special", kind="flag",
                         help="Control tokens written out in the prompt, such as <|im_end|>, "
                              "become those tokens; without it they are text.")
    stop: tuple[str, ...] = _opt((), "-r", "--stop", "--reverse-prompt", kind="list",
                                 help="Stop before this text (repeatable).")
    ignore_eos: bool = _opt(False, "--ignore-eos", kind="flag",
                            help="Continue after the end-of-text token.")
    json: bool = _opt(False, "--json", kind="flag",
                      help="Print one JSON object instead of text.")
    no_display_prompt: bool = _opt(False, "--no-display-prompt", kind="flag",
                                   help="Do not print the prompt before the text.")


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Options of the HTTP server (`pipeinfer serve`)."""

    host: str = _opt("127.0.0.1", "--host", kind="str",
                     help="Address to listen on; 0.0.0.0: all networks of this host.")
    port: int = _opt(8080, "--port", low=0, high=65535,
                     help="Port to listen on; 0: choose a free one and print it.")
    api_key: tuple[str, ...] = _opt((), "--api-key", kind="list", secret=True,
                                    help="Key that clients must send (repeatable). Other users of "
                                         "the host can see it on the command line: use "
                                         "PIPEINFER_API_KEY or --api-key-file to keep it private.")
    api_key_file: str = _opt("", "--api-key-file", kind="str",
                             help="File with one key per line; scopes=ask,watch,change, "
                                  "requests-per-minute=N, tokens-per-minute=N, at-once=N and "
                                  "connections=N after a key limit it.")
    ssl_cert_file: str = _opt("", "--ssl-cert-file", kind="str",
                              help="Serve HTTPS with this certificate (PEM, with those between it "
                                   "and its authority). A renewed one is loaded within a minute.")
    ssl_key_file: str = _opt("", "--ssl-key-file", kind="str",
                             help="Private key of --ssl-cert-file (PEM, without a password).")
    alias: str = _opt("", "--alias", kind="str",
                      help="Name of the model for clients [default: its file's name].")
    any_model_name: bool = _opt(False, "--any-model-name", kind="flag",
                                help="Answer requests for any model's name, for clients whose "
                                     "names cannot be changed; answers bear the served one.")
    remember_answers: bool = _opt(False, "--remember-answers", kind="flag",
                                  help="Speculate from earlier answers to the same key, too: rank "
                                       "0 stores their last 65,536 tokens in memory. For requests "
                                       "whose answers share their wording.")
    queue: int = _opt(64, "--queue", low=0, high=100_000,
                      help="How many requests may wait beyond --parallel; others get status 429.")
    max_body: int = _opt(4 << 20, "--max-body", low=1024, high=1 << 28,
                         help="Maximum bytes of a request; longer ones get status 413.")
    drain_seconds: float = _opt(30.0, "--drain-seconds", kind="float", low=0,
                                high=86400,
                                help="Seconds that running requests may take to finish when the "
                                     "server is stopped.")
    request_timeout: float = _opt(3600.0, "--request-timeout", kind="float",
                                  low=0.1, high=1e6,
                                  help="Maximum seconds that a request may take in total.")
    client_timeout: float = _opt(60.0, "--client-timeout", kind="float", low=0.1,
                                 high=1e6,
                                 help="Disconnect a client that has not read its answer for this "
                                      "many seconds.")
    restart_timeout: float = _opt(300.0, "--restart-timeout", kind="float", low=0.1, high=1e6,
                                  help="Seconds that requests wait for a job that the launch "
                                       "scripts start again (PIPEINFER_RESTARTS), before they end "
                                       "with an error.")
    cors_origin: tuple[str, ...] = _opt((), "--cors-origin", kind="list",
                                        help="Web page origin that may use the server, such as "
                                             "https://chat.example.org (repeatable), or *.")
    allow_host: tuple[str, ...] = _opt((), "--allow-host", kind="list",
                                       help="Host name under which the server may be reached, such "
                                            "as that of a proxy in front of it (repeatable); on "
                                            "a loopback address other names are refused.")
    log_requests: bool = _opt(False, "--log-requests", kind="flag",
                              help="Log one line per request to standard error (without contents).")
    otlp_endpoint: str = _opt("", "--otlp-endpoint", kind="str",
                              help="Send a trace of every request, without its contents, to this "
                                   "OpenTelemetry collector, such as http://collector:4318 (needs "
                                   "the extra otel).")
    journal: str = _opt("", "--journal", kind="str",
                        help="File from which requests continue after a crash of the HTTP process: "
                             "it stores prompts and answers, readable by this user only.")
    journal_sync: float = _opt(1.0, "--journal-sync", kind="float", low=0.01, high=3600,
                               help="Seconds between two flushes of the journal to disk.")
    journal_keep: float = _opt(3600.0, "--journal-keep", kind="float", low=0, high=1e7,
                               help="Seconds for which a complete answer can be requested again.")
    journal_size: int = _opt(64, "--journal-size", low=1, high=1 << 16,
                             help="MiB of the journal beyond which the oldest complete answers are "
                                  "deleted.")


class _Sections:
    """What `JobConfig` and `Config` have in common: making and changing them by options' names."""

    __slots__ = ()

    @classmethod
    def of(cls, **values: Any) -> Self:
        """With these options, the others at their defaults. Raises TypeError for unknown ones."""
        return cls().replace(**values)

    def replace(self, **values: Any) -> Self:
        """A copy with other values of these options. Raises TypeError for unknown ones."""
        parts: dict[str, Any] = {}
        for part in dataclasses.fields(self):  # type: ignore[arg-type]
            old: Any = getattr(self, part.name)
            kind: Any = type(old)
            if part.name == "given":
                if part.name in values:
                    parts[part.name] = values.pop(part.name)
            elif mine := {n: values.pop(n) for n in _names_of(kind) & set(values)}:
                parts[part.name] = (old.replace(**mine) if isinstance(old, _Sections)
                                    else dataclasses.replace(old, **mine))
        if values:
            raise TypeError(f"{type(self).__name__} has no option {', '.join(values)}")
        return dataclasses.replace(self, **parts)  # type: ignore[type-var]

    def values(self) -> dict[str, Any]:
        """Every option of every section by its name."""
        found: dict[str, Any] = {}
        for part in dataclasses.fields(self):  # type: ignore[arg-type]
            section = getattr(self, part.name)
            if isinstance(section, _Sections):
                found |= section.values()
            elif dataclasses.is_dataclass(section):
                found |= {f.name: getattr(section, f.name) for f in dataclasses.fields(section)}
        own: dict[str, Any] = found.pop("own", {})
        return found | own


@dataclass(frozen=True, slots=True)
class JobConfig(_Sections):
    """What a running job is made of.

    given: names of options that the command line gave; settings of single hosts leave those alone.
    """

    model: ModelConfig = ModelConfig()
    cluster: ClusterConfig = ClusterConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    given: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Config(_Sections):
    """All sections: what a command was given."""

    job: JobConfig = JobConfig()
    sampling: SamplingConfig = SamplingConfig()
    request: RequestConfig = RequestConfig()
    serve: ServeConfig = ServeConfig()


SECTIONS: Mapping[str, type] = {
    "model": ModelConfig, "cluster": ClusterConfig, "speculation": SpeculationConfig,
    "sampling": SamplingConfig, "request": RequestConfig, "serve": ServeConfig,
}


@cache
def options(*sections: str) -> Mapping[str, Option]:
    """Names to declarations, in order; of these sections, or of all."""
    return {f.name: f.metadata["option"] for name in sections or SECTIONS
            for f in dataclasses.fields(SECTIONS[name]) if "option" in f.metadata}


@cache
def _names_of(kind: Any) -> frozenset[str]:
    names = set()
    for part in dataclasses.fields(kind):
        if "option" in part.metadata:
            names.add(part.name)
        elif dataclasses.is_dataclass(inner := type(part.default)):
            names |= _names_of(inner)
        else:
            names.add(part.name)
    return frozenset(names)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A config, where each of its values came from, and strategies' own options with defaults."""

    config: Config
    origin: Mapping[str, str]
    own: Mapping[str, Any] = field(default_factory=dict)

    def show(self) -> str:
        """One line per value: name, value, origin."""
        values = {**self.own, **self.config.values()}
        width = max(map(len, self.origin))
        return "\n".join(
            f"{name:{width}}  {_shown(name, values[name]):24}  {origin}"
            for name, origin in self.origin.items())


def _shown(name: str, value: Any) -> str:
    secret = name in options() and options()[name].secret
    return "(hidden)" if value and secret else repr(value)
