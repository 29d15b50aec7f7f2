"""The options of requests and of the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass

from pipeinfer.config.option import opt, setting


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How the target chooses a token."""

    temp: float = opt(0.8, "--temp", kind="float", low=0, high=100,
                      help="Temperature; 0: always the most probable token.")
    top_k: int = opt(40, "--top-k", low=0, high=10**7,
                     help="Keep the k most probable tokens; 0: all.")
    top_p: float = opt(0.95, "--top-p", kind="float", low=0, high=1,
                       help="Keep the most probable tokens whose probabilities add up to this; "
                            "1: all.")
    min_p: float = opt(0.05, "--min-p", kind="float", low=0, high=1,
                       help="Keep tokens at least this probable relative to the best one.")
    repeat_penalty: float = opt(1.0, "--repeat-penalty", kind="float",
                                low=0.01, high=100,
                                help="Divide the logits of repeated tokens by this.")
    presence_penalty: float = opt(0.0, "--presence-penalty", kind="float",
                                  low=-100, high=100,
                                  help="Subtract this from the logits of repeated tokens.")
    frequency_penalty: float = opt(0.0, "--frequency-penalty", kind="float",
                                   low=-100, high=100,
                                   help="Subtract this from a token's logit for each repetition.")
    repeat_last_n: int = opt(64, "--repeat-last-n", low=-1, high=2**24,
                             help="How many last tokens count for penalties; 0: none, -1: all.")
    logit_bias: tuple[str, ...] = opt((), "-l", "--logit-bias", kind="list",
                                      help="TOKEN_ID(+|-)BIAS, such as 15043+1, is added to a "
                                           "token's logit (repeatable).")
    seed: int = opt(-1, "-s", "--seed", low=-1, high=2**63 - 1,
                    help="Random seed; -1: choose one and report it.")


@dataclass(frozen=True, slots=True)
class GrammarConfig:
    """What an answer on the command line has to follow; clients of a server send their own."""

    grammar: str = opt("", "--grammar", kind="str",
                       help="Grammar (GBNF) that the text has to follow.")
    grammar_file: str = opt("", "--grammar-file", kind="str",
                            help="File with the grammar.")
    json_schema: str = opt("", "-j", "--json-schema", kind="str",
                           help="JSON schema that the text has to follow; {} for any JSON.")


@dataclass(frozen=True, slots=True)
class RequestConfig:
    """One prompt on the command line, and how its answer is printed."""

    prompt: str = opt("", "-p", "--prompt", kind="str", help="Prompt text.")
    file: str = opt("", "-f", "--file", kind="str",
                    help="File with the prompt; -: standard input.")
    image: tuple[str, ...] = opt((), "--image", kind="list",
                                 help="Picture (JPEG, PNG, GIF, BMP) or sound (WAV, MP3, FLAC) for "
                                      "the next <__media__> in the prompt, or before it "
                                      "(repeatable).")
    n_predict: int = opt(128, "-n", "--n-predict", "--predict", low=0,
                         high=2**24, help="Maximum number of tokens to generate.")
    chat: bool = opt(False, "--chat", kind="flag",
                     help="Put the prompt into the model's chat template.")
    special: bool = opt(False, "--special", kind="flag",
                        help="Control tokens written out in the prompt, such as <|im_end|>, "
                             "become those tokens; without it they are text.")
    stop: tuple[str, ...] = opt((), "-r", "--stop", "--reverse-prompt", kind="list",
                                help="Stop before this text (repeatable).")
    ignore_eos: bool = opt(False, "--ignore-eos", kind="flag",
                           help="Continue after the end-of-text token.")
    json: bool = opt(False, "--json", kind="flag",
                     help="Print one JSON object instead of text.")
    no_display_prompt: bool = opt(False, "--no-display-prompt", kind="flag",
                                  help="Do not print the prompt before the text.")


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Options of the HTTP server (`pipeinfer serve`)."""

    host: str = opt("127.0.0.1", "--host", kind="str", fixed=True,
                    help="Address to listen on; 0.0.0.0: all networks of this host; unix:PATH: "
                         "a Unix socket for programs of this user.")
    port: int = opt(8080, "--port", low=0, high=65535, fixed=True,
                    help="Port to listen on; 0: choose a free one and print it.")
    api_key: tuple[str, ...] = opt((), "--api-key", kind="list", secret=True,
                                   help="Key that clients must send (repeatable). Other users of "
                                        "the host can see it on the command line: use "
                                        "PIPEINFER_API_KEY or --api-key-file to keep it private.")
    api_key_file: str = opt("", "--api-key-file", kind="str",
                            help="File with one key per line; scopes=ask,watch,change, "
                                 "requests-per-minute=N, tokens-per-minute=N, at-once=N and "
                                 "connections=N after a key limit it.")
    ssl_cert_file: str = opt("", "--ssl-cert-file", kind="str", fixed=True,
                             help="Serve HTTPS with this certificate (PEM, with those between it "
                                  "and its authority). A renewed one is loaded within a minute.")
    ssl_key_file: str = opt("", "--ssl-key-file", kind="str", fixed=True,
                            help="Private key of --ssl-cert-file (PEM, without a password).")
    alias: str = opt("", "--alias", kind="str",
                     help="Name of the model for clients [default: its file's name].")
    any_model_name: bool = opt(False, "--any-model-name", kind="flag",
                               help="Answer requests for any model's name, for clients whose "
                                    "names cannot be changed; answers bear the served one.")
    remember_answers: bool = opt(False, "--remember-answers", kind="flag",
                                 help="Speculate from earlier answers to the same key, too: rank "
                                      "0 stores their last 65,536 tokens in memory. For requests "
                                      "whose answers share their wording.")
    image_urls: tuple[str, ...] = opt((), "--image-urls", kind="list",
                                      help="Host from which the server fetches pictures that a "
                                           "client names by http(s) URL (repeatable); without it "
                                           "only those sent as data: are read.")
    separate_keys: bool = setting(False, kind="flag",
                                  help="Let no key's prompts be read, in memory or on disks, for "
                                       "another key, which could find out by time what was asked.")
    queue: int = opt(64, "--queue", low=0, high=100_000,
                     help="How many requests may wait beyond --parallel; others get status 429.")
    max_body: int = setting(4 << 20, low=1024, high=1 << 28,
                            help="Maximum bytes of a request; longer ones get status 413.")
    drain_seconds: float = opt(30.0, "--drain-seconds", kind="float", low=0,
                               high=86400,
                               help="Seconds that running requests may take to finish when the "
                                    "server is stopped.")
    request_timeout: float = opt(3600.0, "--request-timeout", kind="float",
                                 low=0.1, high=1e6,
                                 help="Maximum seconds that a request may take in total.")
    client_timeout: float = setting(60.0, kind="float", low=0.1, high=1e6,
                                    help="Disconnect a client that has not read its answer for "
                                         "this many seconds.")
    restart_timeout: float = setting(300.0, kind="float", low=0.1, high=1e6,
                                     help="Seconds that requests wait for a job that the launch "
                                          "scripts start again (PIPEINFER_RESTARTS), before they "
                                          "end with an error.")
    cors_origin: tuple[str, ...] = opt((), "--cors-origin", kind="list",
                                       help="Web page origin that may use the server, such as "
                                            "https://chat.example.org (repeatable), or *.")
    allow_host: tuple[str, ...] = opt((), "--allow-host", kind="list",
                                      help="Host name under which the server may be reached, such "
                                           "as that of a proxy in front of it (repeatable); on "
                                           "a loopback address other names are refused.")
    reasoning_format: str = setting("auto", kind="str",
                                    choices=("none", "deepseek", "auto"),
                                    help="Where reasoning goes, as in llama.cpp's server; none: "
                                         "into the content.")
    race: bool = setting(True, kind="flag",
                         help="Let the page of a server on a loopback address and one host race "
                              "three policies over stages that are paced as slow hosts.")
    log_requests: bool = opt(False, "--log-requests", kind="flag",
                             help="Log one line per request to standard error (without contents).")
    journal: str = opt("", "--journal", kind="str", fixed=True,
                       help="File from which requests continue after a crash of the HTTP process: "
                            "it stores prompts and answers, readable by this user only.")
    journal_sync: float = setting(1.0, kind="float", low=0.01, high=3600, fixed=True,
                                  help="Seconds between two flushes of the journal to disk.")
    journal_keep: float = setting(3600.0, kind="float", low=0, high=1e7, fixed=True,
                                  help="Seconds for which a complete answer can be requested "
                                       "again.")
    journal_size: int = setting(64, low=1, high=1 << 16, fixed=True,
                                help="MiB of the journal beyond which the oldest complete answers "
                                     "are deleted.")
