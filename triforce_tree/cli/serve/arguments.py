"""The options of ``serve``; nothing here imports torch, as in ``cli.arguments``."""

from typing import Any

from triforce_tree.cli.groups import add_engine, add_parser
from triforce_tree.cli.parsing import above_zero, not_negative, positive
from triforce_tree.server.tools.formats import FORMATS


def add(subparsers: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = add_parser(
        subparsers,
        "serve",
        "triforce_tree.cli.serve.run",
        "Answer OpenAI's chat completions and completions over HTTP; needs pip install '.[server]'.",
    )
    parser.add_argument(
        "--config", metavar="FILE",
        help="TOML or YAML file (.toml, .yaml, .yml) with values of the other options by name, as in port: "
        "8000; options of the command line replace them",
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all")
    parser.add_argument("--port", type=positive, default=8000, help="port to listen on")
    parser.add_argument("--model-name", help="what clients call the model; by default what --target names")
    parser.add_argument(
        "--api-key", help="that clients have to send; by default $TRIFORCE_TREE_API_KEY, else anyone may ask"
    )
    parser.add_argument("--max-waiting", type=positive, default=64, help="texts in the queue before 429")
    parser.add_argument(
        "--max-batch", type=positive, metavar="N",
        help="sequences decoded together, fewer if memory is short; by default 32 on a GPU, 16 on a CPU",
    )  # fmt: skip
    parser.add_argument(
        "--max-batch-tokens", type=positive, metavar="N",
        help="tokens of all prompts that are decoded together; with a longer one only prompts that share its "
        "beginning; by default as many as the memory of a GPU holds, 65,536 on a CPU",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=above_zero, metavar="SECONDS",
        help="from the arrival of a request to its end; by default there is no limit",
    )  # fmt: skip
    parser.add_argument("--max-new-tokens", type=positive, default=4096, help="most of one request")
    parser.add_argument(
        "--max-body", metavar="SIZE",
        help="most bytes of a request; by default 64 for each token that the model can take, at least 1MiB",
    )  # fmt: skip
    parser.add_argument(
        "--reading-timeout", type=above_zero, default=5.0, metavar="SECONDS",
        help="of processor time for a request's chat template and tokenizer, and as many again for each MiB",
    )  # fmt: skip
    parser.add_argument(
        "--tool-parser", choices=tuple(FORMATS),
        help="format of the model's tool calls; by default that of its chat template",
    )  # fmt: skip
    parser.add_argument(
        "--keep-reasoning", action="store_true",
        help="leave reasoning, as between <think> and </think>, in the content of replies",
    )  # fmt: skip
    parser.add_argument(
        "--warm-up-tokens", type=not_negative, nargs="+", metavar="N",
        help="tokens of the prompts that are decoded before requests are answered, so that stages are "
        "prepared; 0 for none; by default 64 on a CPU, and on a GPU --max-batch-tokens or 65,536",
    )  # fmt: skip
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info",
        help="of what stderr gets; info has a line for each request, and one of throughput every ten seconds",
    )  # fmt: skip
    parser.add_argument(
        "--allowed-origins", nargs="+", default=[], metavar="URL",
        help="origins of web pages whose scripts may ask (CORS), * for all; by default none",
    )  # fmt: skip
    parser.add_argument(
        "--shutdown-timeout", type=positive, default=20, metavar="SECONDS",
        help="on SIGTERM or Ctrl-C running texts have so long to end",
    )  # fmt: skip
    add_engine(parser)
