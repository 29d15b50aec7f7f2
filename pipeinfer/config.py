"""Every option, declared once: its flags, type, bounds, default and help.

The command line wins over the environment (`PIPEINFER_<NAME>`), the environment over a TOML file
(`--config`), the file over defaults; where each value came from is kept. This module knows no
model, rank or click command; `cli` turns the declarations into options.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeinfer.errors import UsageError
from pipeinfer.files import read_toml

ENV_PREFIX = "PIPEINFER_"
CACHE_TYPES = ("auto", "f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")


@dataclass(frozen=True, slots=True)
class Option:
    """How one field is given. kind: int, float, str, flag or list."""

    flags: tuple[str, ...]
    kind: str
    help: str
    group: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    off_flag: str | None = None
    secret: bool = False  #: never shown


def _opt(default: Any, *flags: str, kind: str = "int", help: str, group: str, **extra: Any) -> Any:
    option = Option(flags, kind, help, group, **extra)
    return field(default=default, metadata={"option": option})


@dataclass(frozen=True, slots=True)
class Config:
    """A complete, checked set of values. Empty strings mean "not given"."""

    # model
    model: str = _opt("", "-m", "--model", kind="str", group="model",
                      help="Target model: a GGUF file, a Hugging Face folder for torch, or task, "
                           "the embedded model for --decomposer [default: the embedded one].")
    draft_model: str = _opt("", "-md", "--model-draft", kind="str", group="model",
                            help="Draft model (GGUF, same vocabulary) [default: the embedded one "
                                 "with the embedded target, else none].")
    backend: str = _opt("auto", "--backend", kind="str", group="model",
                        choices=("auto", "llamacpp", "torch"),
                        help="What evaluates the target's layers; auto: torch for a Hugging Face "
                             "folder, llama.cpp for GGUF. See docs/torch.md.")
    device: str = _opt("auto", "--device", kind="str", group="model",
                       help="Where torch computes: cpu, cuda or cuda:N; auto: a GPU that torch "
                            "sees, else the processor. (llama.cpp: see -ngl.)")
    dtype: str = _opt("auto", "--dtype", kind="str", group="model",
                      choices=("auto", "float32", "bfloat16"),
                      help="Type of torch's weights, cache and arithmetic; auto: float32 on "
                           "processors, bfloat16 on GPUs.")
    draft_small: str = _opt("", "-mds", "--model-draft-small", kind="str", group="model",
                            help="A second, smaller draft model that is asked first; the other "
                                 "one where it is unsure.")
    distribute: bool = _opt(False, "--distribute", kind="flag", group="model",
                            help="Ranks without the model file get their layers from rank 0 and "
                                 "keep them; see docs/clusters.md.")
    ctx: int = _opt(0, "-c", "--ctx-size", group="model", low=0, high=2**24,
                    help="Context in tokens; 0 takes the model's own, at most 8192.")
    threads: int = _opt(0, "-t", "--threads", group="model", low=0, high=512,
                        help="Threads per stage; 0 shares the host's cores among its ranks.")
    threads_draft: int = _opt(0, "-td", "--threads-draft", group="model", low=0, high=512,
                              help="Threads of the draft; 0 as for a stage.")
    gpu_layers: int = _opt(0, "-ngl", "--n-gpu-layers", group="model", low=0, high=100_000,
                           help="Layers of a stage on its GPU.")
    gpu_layers_draft: int = _opt(0, "-ngld", "--n-gpu-layers-draft", group="model", low=0,
                                 high=100_000, help="Layers of the draft on the GPU.")
    cache_type_k: str = _opt("auto", "-ctk", "--cache-type-k", kind="str", group="model",
                             choices=CACHE_TYPES,
                             help="Type of the cached keys; auto: what keeps decodes exact "
                                  "(f16).")
    cache_type_v: str = _opt("auto", "-ctv", "--cache-type-v", kind="str", group="model",
                             choices=CACHE_TYPES,
                             help="Type of the cached values; auto: what keeps decodes exact "
                                  "(q8_0 on a CPU, see docs/exactness.md).")
    ubatch: int = _opt(0, "-ub", "--ubatch-size", group="model", low=0, high=65536,
                       help="Most prompt rows of one decode: lowers --chunk.")
    flash_attn: str = _opt("auto", "-fa", "--flash-attn", kind="str", group="model",
                           choices=("auto", "on", "off"), help="Flash attention.")
    mlock: bool = _opt(False, "--mlock", kind="flag", group="model",
                       help="Keep the weights in memory.")
    mmap: bool = _opt(True, "--mmap", kind="flag", group="model", off_flag="--no-mmap",
                      help="Map the weights instead of reading them.")
    numa: str = _opt("", "--numa", kind="str", group="model",
                     choices=("", "distribute", "isolate", "numactl"), help="NUMA strategy.")

    # runtime
    policy: str = _opt("", "--policy", kind="str", group="runtime",
                       choices=("", "iterative", "speculative", "pipeinfer"),
                       help="What to issue next [default: pipeinfer with a draft, else iterative].")
    proposer: tuple[str, ...] = _opt((), "--proposer", kind="list", group="runtime",
                                     choices=("draft", "prompt-lookup", "lookahead", "bita"),
                                     help="Where guesses come from (repeatable: asked in that "
                                          "order until one is sure): the draft model, what "
                                          "followed when the same tokens came up before; or, "
                                          "asked before those, n-grams that the target makes in "
                                          "spare rows (docs/lookahead.md) or learned masks "
                                          "(--bita) [default: bita with --bita, else draft, if "
                                          "there is a draft model].")
    layout: str = _opt("pipeline", "--layout", kind="str", group="runtime",
                       choices=("pipeline", "replicate"),
                       help="pipeline: each rank holds some layers; replicate: each holds the "
                            "whole model, and the rows of lookahead decoding are dealt out "
                            "(docs/lookahead.md).")
    lookahead_window: int = _opt(2, "--lookahead-window", group="runtime", low=0, high=128,
                                 help="Columns of --proposer lookahead (W): n-grams per step.")
    lookahead_ngram: int = _opt(5, "--lookahead-ngram", group="runtime", low=2, high=16,
                                help="Tokens of an n-gram of --proposer lookahead (N).")
    lookahead_candidates: int = _opt(2, "--lookahead-candidates", group="runtime", low=0, high=128,
                                     help="Most n-grams that --proposer lookahead verifies in a "
                                          "step (G).")
    decomposer: str = _opt("", "--decomposer", kind="str", group="runtime",
                           choices=("", "pasta", "pdos", "skeleton", "apar"),
                           help="Decode a response in several threads at once; see "
                                "docs/decomposers.md. The prompt becomes a chat message; the model "
                                "is by default a small embedded one that was trained for it.")
    decompose_threads: int = _opt(8, "--decompose-threads", group="runtime", low=1, high=64,
                                  help="Most threads of a response beside its main one.")
    pasta_positions: str = _opt("pred-10x", "--pasta-positions", kind="str", group="runtime",
                                help="How far the main thread moves on behind a promise: pred-10x "
                                     "(ten times its attribute), pred-1x, fixed or fixed:N.")
    pace_ms: float = _opt(0.0, "--pace-ms", kind="float", group="runtime", low=0, high=60_000,
                          help="For experiments: every decode of a stage takes at least so many "
                               "milliseconds, as on a slower machine.")
    pace_row_ms: float = _opt(0.0, "--pace-row-ms", kind="float", group="runtime", low=0,
                              high=60_000, help="Milliseconds more for each further row of a "
                                                "decode, with --pace-ms.")
    ablate: tuple[str, ...] = _opt((), "--ablate", kind="list", group="runtime",
                                   choices=("async", "continuous", "multibuffer", "cancel"),
                                   help="Switch a component off (repeatable).")
    bita: str = _opt("", "--bita", kind="str", group="runtime",
                     help="BiTA adapter (safetensors) of the model: learned mask tokens guess "
                          "ahead; torch backend only, see docs/bita.md. With --proposer name bita "
                          "there, too.")
    bita_top: int = _opt(3, "--bita-top", group="runtime", low=1, high=8,
                         help="Likeliest tokens of the first mask that are verified with --bita, "
                              "of each further one a token less.")
    draft_max: int = _opt(0, "--draft-max", "--draft", group="runtime", low=0, high=64,
                          help="Guesses per micro-batch; 0: tuned while running.")
    tree_max: int = _opt(0, "--tree-max", group="runtime", low=0, high=256,
                         help="Drafted tokens of a synchronous tree (--policy speculative); 0: 2 "
                              "to 7 by what a further row costs here.")
    draft_p_min: float = _opt(-1.0, "--draft-p-min", kind="float", group="runtime", low=-1, high=1,
                              help="Confidence below which a drafted token is not issued; -1: "
                                   "0.4 for synchronous trees, else --path-min alone decides.")
    path_min: float = _opt(-1.0, "--path-min", kind="float", group="runtime", low=-1, high=2,
                           help="Least estimated probability that a guess and all before it are "
                                "right; -1: tuned while running.")
    alternatives: int = _opt(-1, "--alternatives", group="runtime", low=-1, high=7,
                             help="Second, third, ... choices of the draft that may be issued "
                                  "beside its first; -1: 1, or 2 on long pipelines.")
    adapt: bool = _opt(True, "--adapt", kind="flag", group="runtime", off_flag="--no-adapt",
                       help="Tune credit, micro-batch size, cutoff and tip while running.")
    p_split: float = _opt(-1.0, "--p-split", kind="float", group="runtime", low=-1, high=1,
                          help="Confidence from which a further branch or alternative counts; "
                               "-1: 0.2 for synchronous trees, else 0.02.")
    p_recovery: float = _opt(0.0, "--p-recovery", kind="float", group="runtime", low=0, high=1,
                             help="Added to the cutoff per run issued since the last acceptance.")
    p_decay: float = _opt(0.0, "--p-decay", kind="float", group="runtime", low=0, high=1,
                          help="Taken off the cutoff per empty draft since the last acceptance.")
    tip: str = _opt("auto", "--tip", kind="str", group="runtime",
                    choices=("auto", "alone", "joined"),
                    help="After a miss issue the accepted token alone at once, or joined with the "
                         "first guesses below it; auto: tuned while running.")
    branches: int = _opt(1, "--branches", "-np", group="runtime", low=1, high=32,
                         help="Paths of a synchronous tree (1: a chain).")
    partitions: int = _opt(-1, "--partitions", group="runtime", low=-1, high=200,
                           help="Sequence ids for side branches; -1: twice the first credit, 8 to "
                                "60.")
    credit: int = _opt(0, "--credit", group="runtime", low=0, high=1024,
                       help="Most useful runs in flight; 0: tuned, starting at stages + 1.")
    chunk: int = _opt(64, "--chunk", group="runtime", low=1, high=4096,
                      help="Prompt tokens per run, cut at its multiples.")
    exact: str = _opt("on", "--exact", kind="str", group="runtime", choices=("on", "off"),
                      help="Keep runs to the width at which decodes are bit-equal to single rows.")
    cancel_path: str = _opt("direct", "--cancel-path", kind="str", group="runtime",
                            choices=("direct", "backward"),
                            help="How cancellations travel: to every stage at once, or against "
                                 "the flow as in the paper.")
    head_stage: bool = _opt(False, "--head-stage", kind="flag", group="runtime",
                            help="Rank 0 holds the first layers too.")
    keep_binding: bool = _opt(False, "--keep-binding", kind="flag", group="runtime",
                              help="Leave the processor binding as the launcher set it.")
    nodes: str = _opt("", "--nodes", kind="str", group="runtime",
                      help="TOML file with settings per host, see docs/clusters.md [default: the "
                           "one beside the hostfile under launch/ssh].")
    split: str = _opt("planned", "--split", kind="str", group="runtime",
                      choices=("planned", "equal"),
                      help="Layers per stage: planned by what each rank measured, or equally many.")
    layers: str = _opt("", "--layers", kind="str", group="runtime",
                       help="Layers of each stage, like 10,12,12,6; 0 leaves a rank out.")
    remeasure: bool = _opt(False, "--remeasure", kind="flag", group="runtime",
                           help="Measure the ranks anew instead of taking remembered figures.")
    parallel: int = _opt(1, "--parallel", group="runtime", low=1, high=128,
                         help="Requests decoded at the same time; further ones wait (serve: 16).")
    cache_tokens: int = _opt(0, "--cache-tokens", group="runtime", low=0, high=2**26,
                             help="Tokens that the cache holds for all requests and remembered "
                                  "prompts together; 0: the context, with --parallel twice that.")
    prefix_cache: bool = _opt(True, "--prefix-cache", kind="flag", group="runtime",
                              off_flag="--no-prefix-cache",
                              help="Keep prompts of ended requests: one that starts alike does "
                                   "not compute that part again.")
    speculation: str = _opt("auto", "--speculation", kind="str", group="runtime",
                            choices=("auto", "on", "off"),
                            help="With several requests: guess as far as their own tokens leave "
                                 "room (auto), as if each were alone (on), or not at all (off).")
    timeout: float = _opt(300.0, "--timeout", kind="float", group="runtime", low=0.1, high=1e6,
                          help="Seconds without an answer after which the job gives up.")
    trace: str = _opt("", "--trace", kind="str", group="runtime",
                      help="Write a Chrome trace (JSON) of every run to this file.")
    heartbeat: float = _opt(2.0, "--heartbeat", kind="float", group="runtime", low=0, high=3600,
                            help="Seconds of silence after which a rank counts as hanging and is "
                                 "killed, and a host as lost; 0 watches nobody (for debuggers).")
    spares: int = _opt(0, "--spares", group="runtime", low=0, high=1000,
                       help="How many ranks, the last ones, hold no layers but stand in at once "
                            "for one that dies; see docs/chaos.md.")
    rebalance: str = _opt("auto", "--rebalance", kind="str", group="runtime",
                          choices=("auto", "off"),
                          help="serve: deal the layers out anew, between requests, when a stage "
                               "has become slow and that promises a quarter more speed.")
    fault: tuple[str, ...] = _opt((), "--fault", kind="list", group="runtime",
                                  help="For experiments: let something go wrong on purpose, like "
                                       "kill@2:decode=30 (repeatable; see docs/chaos.md).")

    # sampling
    temp: float = _opt(0.8, "--temp", kind="float", group="sampling", low=0, high=100,
                       help="Temperature; 0 always takes the likeliest token.")
    top_k: int = _opt(40, "--top-k", group="sampling", low=0, high=10**7,
                      help="Keep the k likeliest tokens; 0 keeps all.")
    top_p: float = _opt(0.95, "--top-p", kind="float", group="sampling", low=0, high=1,
                        help="Keep the likeliest tokens that hold this mass; 1 keeps all.")
    min_p: float = _opt(0.05, "--min-p", kind="float", group="sampling", low=0, high=1,
                        help="Keep tokens at least this likely relative to the likeliest.")
    repeat_penalty: float = _opt(1.0, "--repeat-penalty", kind="float", group="sampling",
                                 low=0.01, high=100, help="Divide repeated tokens' logits.")
    presence_penalty: float = _opt(0.0, "--presence-penalty", kind="float", group="sampling",
                                   low=-100, high=100, help="Subtract from repeated tokens.")
    frequency_penalty: float = _opt(0.0, "--frequency-penalty", kind="float", group="sampling",
                                    low=-100, high=100, help="Subtract per repetition.")
    repeat_last_n: int = _opt(64, "--repeat-last-n", group="sampling", low=-1, high=2**24,
                              help="Tokens the penalties look back on; 0 none, -1 all.")
    logit_bias: tuple[str, ...] = _opt((), "-l", "--logit-bias", kind="list", group="sampling",
                                       help="TOKEN_ID(+|-)BIAS, for instance 15043+1 "
                                            "(repeatable).")
    grammar: str = _opt("", "--grammar", kind="str", group="sampling",
                        help="Grammar (GBNF) that the text has to follow.")
    grammar_file: str = _opt("", "--grammar-file", kind="str", group="sampling",
                             help="File with the grammar.")
    json_schema: str = _opt("", "-j", "--json-schema", kind="str", group="sampling",
                            help="JSON schema that the text has to follow; {} for any JSON.")
    seed: int = _opt(-1, "-s", "--seed", group="sampling", low=-1, high=2**63 - 1,
                     help="Seed; -1 draws one and reports it.")

    # request
    prompt: str = _opt("", "-p", "--prompt", kind="str", group="request", help="Prompt text.")
    file: str = _opt("", "-f", "--file", kind="str", group="request",
                     help="File with the prompt, - for standard input.")
    n_predict: int = _opt(128, "-n", "--n-predict", "--predict", group="request", low=0,
                          high=2**24, help="Most tokens to generate.")
    chat: bool = _opt(False, "--chat", kind="flag", group="request",
                      help="Put the prompt into the model's chat template.")
    stop: tuple[str, ...] = _opt((), "-r", "--stop", "--reverse-prompt", kind="list",
                                 group="request", help="End at this text (repeatable).")
    ignore_eos: bool = _opt(False, "--ignore-eos", kind="flag", group="request",
                            help="Go on past the end-of-text token.")
    json: bool = _opt(False, "--json", kind="flag", group="request",
                      help="Print one JSON object instead of text.")
    no_display_prompt: bool = _opt(False, "--no-display-prompt", kind="flag", group="request",
                                   help="Do not print the prompt before the text.")

    # serve
    host: str = _opt("127.0.0.1", "--host", kind="str", group="serve",
                     help="Address to listen on; 0.0.0.0 is every network of this host.")
    port: int = _opt(8080, "--port", group="serve", low=0, high=65535,
                     help="Port to listen on; 0 takes a free one and prints it.")
    api_key: tuple[str, ...] = _opt((), "--api-key", kind="list", group="serve", secret=True,
                                    help="Key that clients have to send (repeatable). Other users "
                                         "of the host see a command line: PIPEINFER_API_KEY or "
                                         "--api-key-file keep it private.")
    api_key_file: str = _opt("", "--api-key-file", kind="str", group="serve",
                             help="File with one key per line.")
    alias: str = _opt("", "--alias", kind="str", group="serve",
                      help="Name of the model for clients [default: its file's name].")
    queue: int = _opt(64, "--queue", group="serve", low=0, high=100_000,
                      help="Requests that may wait beyond --parallel; further ones get 429.")
    max_body: int = _opt(4 << 20, "--max-body", group="serve", low=1024, high=1 << 28,
                         help="Most bytes of a request; longer ones get 413.")
    drain_seconds: float = _opt(30.0, "--drain-seconds", kind="float", group="serve", low=0,
                                high=86400, help="Time that running requests get to end when the "
                                                 "server is asked to leave.")
    request_timeout: float = _opt(3600.0, "--request-timeout", kind="float", group="serve",
                                  low=0.1, high=1e6, help="Seconds that a request may take in all.")
    client_timeout: float = _opt(60.0, "--client-timeout", kind="float", group="serve", low=0.1,
                                 high=1e6, help="Seconds after which a client that takes nothing "
                                                "of its answer is dropped.")
    cors_origin: tuple[str, ...] = _opt((), "--cors-origin", kind="list", group="serve",
                                        help="Web page origin that may use the server, like "
                                             "https://chat.example.org (repeatable), or *.")
    log_requests: bool = _opt(False, "--log-requests", kind="flag", group="serve",
                              help="Write a line per request to standard error (no contents).")

    #: fields that the command line gave: settings of single hosts leave those alone
    given: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Resolved:
    """A config and where each of its values came from."""

    config: Config
    origin: Mapping[str, str]

    def show(self) -> str:
        """One line per value: name, value, origin."""
        names = list(options())
        width = max(map(len, names))
        return "\n".join(
            f"{name:{width}}  {self._value(name):24}  {self.origin[name]}" for name in names
        )

    def _value(self, name: str) -> str:
        value = getattr(self.config, name)
        return "(hidden)" if value and options()[name].secret else repr(value)


def options() -> dict[str, Option]:
    """Field name to declaration, in order."""
    return {f.name: f.metadata["option"] for f in dataclasses.fields(Config) if f.metadata}


def resolve(
    command_line: Mapping[str, Any], environ: Mapping[str, str] | None = None,
    config_file: str | None = None,
) -> Resolved:
    """Merge the sources; `command_line` holds given values only. Raises UsageError."""
    environ = os.environ if environ is None else environ
    from_file = _read_toml(config_file) if config_file else {}
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    defaults = {f.name: f.default for f in dataclasses.fields(Config)}
    for name, option in options().items():
        env_name = ENV_PREFIX + name.upper()
        if name in command_line:
            values[name], origin[name] = command_line[name], "command line"
        elif env_name in environ:
            values[name] = _parse(option, environ[env_name], env_name)
            origin[name] = f"environment {env_name}"
        elif name in from_file:
            values[name], origin[name] = from_file[name], f"file {config_file}"
        else:
            values[name], origin[name] = defaults[name], "default"
        values[name] = _check(option, values[name], origin[name])
    kind = values["cache_type_v"]
    if values["flash_attn"] == "off" and kind not in ("auto", "f16", "f32", "bf16"):
        raise UsageError(f"-ctv {kind} needs flash attention: leave out -fa off")
    return Resolved(Config(**values, given=frozenset(command_line)), origin)


def _read_toml(path: str) -> dict[str, Any]:
    data = read_toml(path, "config file")
    by_name = {}
    names = {name: name for name in options()}
    for name, option in options().items():
        names |= {flag.lstrip("-").replace("-", "_"): name for flag in option.flags if
                  flag.startswith("--")}
    for key, value in data.items():
        known = names.get(key.replace("-", "_"))
        if known is None:
            near = difflib.get_close_matches(key.replace("-", "_"), names, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"config file {path} has an unknown key {key!r}{hint}")
        by_name[known] = tuple(value) if isinstance(value, list) else value
    return by_name


def _parse(option: Option, text: str, source: str) -> Any:
    """A value from the environment."""
    try:
        match option.kind:
            case "int":
                return int(text)
            case "float":
                return float(text)
            case "flag":
                lowered = text.strip().lower()
                if lowered in ("1", "true", "yes", "on"):
                    return True
                if lowered in ("0", "false", "no", "off", ""):
                    return False
                raise ValueError("give 1 or 0")
            case "list":
                return tuple(part for part in text.split(",") if part)
            case _:
                return text
    except ValueError as error:
        raise UsageError(f"{source}={_shown(option, text)} is no {option.kind}: {error}") from error


def _check(option: Option, value: Any, origin: str) -> Any:
    """The value in its type and bounds. Raises UsageError that names the flag."""
    flag = next((f for f in option.flags if f.startswith("--")), option.flags[0])
    where = f"{flag} (from {origin})"
    kinds: dict[str, type | tuple[type, ...]] = {
        "int": int, "float": (int, float), "str": str, "flag": bool, "list": tuple,
    }
    if not isinstance(value, kinds[option.kind]) or (
        isinstance(value, bool) and option.kind != "flag"
    ):
        raise UsageError(f"{where} needs a {option.kind}, not {_shown(option, value)}")
    if option.kind == "float":
        value = float(str(value))
        if math.isnan(value):
            raise UsageError(f"{where} is not a number")
    if isinstance(value, int | float) and option.kind != "flag":
        if option.low is not None and value < option.low:
            raise UsageError(f"{where} is {str(value)[:40]}; the least is {option.low:g}")
        if option.high is not None and value > option.high:
            raise UsageError(f"{where} is {str(value)[:40]}; the most is {option.high:g}")
    if option.choices:
        for part in value if option.kind == "list" else (value,):
            if part not in option.choices:
                known = ", ".join(c for c in option.choices if c)
                raise UsageError(f"{where} is {part!r}; choose from {known}")
    if option.kind == "list" and not all(isinstance(part, str) for part in value):
        raise UsageError(f"{where} needs a list of texts")
    if option.kind in ("str", "list") and any("\0" in part for part in (
            value if option.kind == "list" else (value,))):
        raise UsageError(f"{where} has a NUL character in it")
    return value


def _shown(option: Option, value: Any) -> str:
    """A value for a message; secrets are none."""
    return "what was given" if option.secret else repr(value)[:200]
