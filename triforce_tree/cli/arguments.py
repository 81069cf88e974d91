"""The commands of the command line, their options, and the text of ``--help``.

Nothing here imports torch or transformers, which take seconds, so that ``--help``, ``--version`` and a
misspelt option answer at once. Each command names the module whose ``run(args)`` executes it.
"""

from typing import Any

from triforce_tree import __version__
from triforce_tree.cli.bench import arguments as bench
from triforce_tree.cli.groups import (
    add_engine,
    add_parser,
    add_prompt,
    add_sampling,
    add_text_source,
)
from triforce_tree.cli.parsing import HelpFormatter, Parser, above_zero, finite, not_negative, positive
from triforce_tree.server.tools.formats import FORMATS


def parser() -> Parser:
    top = Parser(
        prog="triforce-tree",
        description="Lossless speculative decoding with hierarchical drafting, for long contexts.",
        formatter_class=HelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = top.add_subparsers(required=True, metavar="command")
    _generate(commands)
    _explain(commands)
    _chat(commands)
    bench.add(commands)
    _check(commands)
    _serve(commands)
    _demo(commands)
    return top


def _generate(subparsers: Any) -> None:
    parser = add_parser(
        subparsers,
        "generate",
        "triforce_tree.cli.generate",
        "Continue a text, or answer a chat, by exactly the target's own distribution; the new text goes to "
        "stdout.",
    )
    add_prompt(parser)
    parser.add_argument("--max-new-tokens", type=positive, default=256, help="most tokens to generate")
    parser.add_argument(
        "--num-beams",
        type=positive,
        default=1,
        metavar="N",
        help="beam search with N beams, as transformers', that share the prompt's keys and values; 1 is none",
    )
    parser.add_argument(
        "--num-return-sequences",
        type=positive,
        default=1,
        metavar="N",
        help="N texts after one prompt, which is stored and read once: samples, or the best beams",
    )
    parser.add_argument(
        "--length-penalty",
        type=finite,
        metavar="X",
        help="with beams: scores are divided by the length to the power of X; without it the checkpoint's",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="then decode the same prompt with the target alone; exit code 1 if greedy texts differ and no "
        "tie between 16-bit logits explains it",
    )
    grammar = parser.add_mutually_exclusive_group()
    grammar.add_argument(
        "--json-schema", metavar="FILE", help="the new text is valid JSON under the schema in this file"
    )
    grammar.add_argument("--regex", metavar="PATTERN", help="the new text matches this regular expression")
    add_sampling(parser)
    add_engine(parser)
    parser.set_defaults(on_several_gpus=True)


def _explain(subparsers: Any) -> None:
    parser = add_parser(
        subparsers,
        "explain",
        "triforce_tree.cli.explain",
        "Continue a text, and show which passes were chosen and why: acceptance by level, depth and rank, "
        "the time of each stage, what other choices would cost, where tokens came from, and a drafted tree.",
    )
    add_prompt(parser)
    parser.add_argument("--max-new-tokens", type=positive, default=128, help="most tokens to generate")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the most probable token")
    parser.add_argument("--seed", type=int, default=0, help="of all draws")
    add_engine(parser)


def _chat(subparsers: Any) -> None:
    parser = add_parser(
        subparsers,
        "chat",
        "triforce_tree.cli.chat",
        "Ask questions about a text, one a line, by the tokenizer's chat template if it has one; answers go "
        "to stdout, and only new tokens are prefilled. /reset forgets all but the text, /save FOLDER writes "
        "the conversation with its keys and values, /help names all of these, /quit ends.",
    )
    parser.add_argument("--file", help="the text; without it the conversation begins with the first line")
    parser.add_argument("--load", metavar="FOLDER", help="go on with a conversation that /save wrote")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--max-new-tokens", type=positive, default=256, help="most tokens of an answer")
    add_sampling(parser)
    add_engine(parser)


def _check(subparsers: Any) -> None:
    parser = add_parser(
        subparsers,
        "check",
        "triforce_tree.cli.check",
        "Test that the output is the target's own: logits and greedy tokens against transformers' decoding "
        "of the same model, sampled tokens against the exact distribution at every level. Exit code 1 if "
        "not.",
    )
    parser.add_argument(
        "--lengths",
        type=positive,
        nargs="+",
        metavar="N",
        help="tokens of the prompts; without it 1, 67, 1021 and twice the budget + 455",
    )
    parser.add_argument(
        "--new-tokens", type=positive, default=128, help="greedy tokens to compare for each prompt"
    )
    parser.add_argument(
        "--draws",
        type=not_negative,
        default=400,
        help="sampled tokens for each prompt and level; 0 skips the test",
    )
    parser.add_argument("--contexts", type=positive, default=4, help="prompts of the sampling test")
    parser.add_argument(
        "--context",
        type=positive,
        help="most tokens of each of these prompts; without it twice the budget + 455",
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="of the sampling test")
    parser.add_argument("--seed", type=int, default=0, help="of all draws")
    add_text_source(parser)
    add_engine(parser)


def _serve(subparsers: Any) -> None:
    parser = add_parser(
        subparsers,
        "serve",
        "triforce_tree.cli.serve",
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


def _demo(subparsers: Any) -> None:
    parser = add_parser(
        subparsers,
        "demo",
        "triforce_tree.cli.demo",
        "Ask for a number that is hidden in a long part of Python's own help text, and continue the text, "
        "with the embedded pair: by three levels and by the target alone in turns, piece by piece.",
    )
    parser.add_argument("--prompt-tokens", type=positive, default=12_288, help="tokens of the prompt")
    parser.add_argument(
        "--start",
        type=positive,
        help="token of the help text at which the prompt begins; without it, the prompt ends before a "
        "passage that does not repeat itself",
    )
    parser.add_argument("--new-tokens", type=positive, default=192, help="tokens to generate")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the most probable token")
    parser.add_argument("--seed", type=int, default=0, help="of the hidden number, and of all draws")
    add_engine(parser)
    parser.set_defaults(levels=3, given=frozenset({"levels"}))
