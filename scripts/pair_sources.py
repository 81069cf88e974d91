"""Where the corpus of the embedded pair comes from: packages, licences, readers and caps.

Everything here stands on developers' machines as installed documentation or sources, under
permissive licences. ``{docs}`` is a folder with one unpacked documentation package per sub-folder,
``{wheels}`` the same for wheels, ``{rust}`` a toolchain's ``share/doc/rust/html``, ``{stdlib}`` a
CPython ``lib/python3.x``. Paths are globs below those roots.

The language reference of Python's manual is left out whole: pydoc's topics, the held-out text, are
built from it.
"""

from dataclasses import dataclass

PSF, BSD, MIT, APACHE, MIXED = "PSF-2.0", "BSD-3-Clause", "MIT", "Apache-2.0", "MIT or Apache-2.0"

# Pages that are no prose, or not in English, or the held-out text itself.
EXCLUDED = (
    "/_modules/", "/_sources/", "/genindex", "py-modindex", "/search.html", "/src/", "/zh", "/ja/",
    "/ko/", "/fr/", "/de/", "/es/", "/tr/", "/da/", "/pt-br/", "/pt/", "/ru/", ".html.de", ".html.fr",
    ".html.ja", ".html.ko", ".html.es", ".html.tr", ".html.zh", ".html.da", ".html.pt", "pydoc_data",
    "/lib2to3/tests", "doc-index", "/allclasses", "-frame.html", "/index-files/", "-members.html",
    "/tests/", "/test/", "/testing/data", "/_vendor/", "/class-use/", "package-use", "package-tree",
    "/locale/", "all-items",
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """One source: ``reader`` names an entry of ``pair_text.READERS``; ``cap`` is in MB of text."""

    name: str
    licence: str
    group: str  # python, docs, docstrings, api, code
    reader: str
    patterns: tuple[str, ...]
    cap: float
    excluded: tuple[str, ...] = ()


def _docs(licence: str, cap: float, *names: str) -> list[Source]:
    return [Source(name, licence, "docs", "html", (f"{{docs}}/{name}/**/*.html*",), cap) for name in names]


def _wheels(licence: str, cap: float, *names: str) -> list[Source]:
    return [
        Source(
            f"{name} docstrings", licence, "docstrings", "docstrings", (f"{{wheels}}/{name}/**/*.py",), cap
        )
        for name in names
    ]


SOURCES: list[Source] = [
    Source(
        "Python manual without its language reference",
        PSF,
        "python",
        "html",
        ("{docs}/python3.11-doc/**/*.html",),
        30,
        ("/reference/",),
    ),
    Source(
        "Python standard library docstrings",
        PSF,
        "python",
        "docstrings",
        ("{stdlib}/**/*.py",),
        12,
        ("site-packages",),
    ),
    Source("Cython manual", APACHE, "python", "html", ("{docs}/cython-doc/**/*.html",), 4),
    Source("PyPy manual", MIT, "python", "html", ("{docs}/pypy3-doc/**/*.html",), 4),
    Source(
        "Python standard library sources",
        PSF,
        "code",
        "code",
        ("{stdlib}/**/*.py",),
        22,
        ("site-packages", "/encodings/", "/idlelib/idle_test"),
    ),
    *[
        Source(
            f"{name} manual",
            BSD if name != "mypy-doc" else MIT,
            "python",
            "html",
            (f"{{docs}}/{name}/**/*.html",),
            8,
        )
        for name in (
            "python-django-doc", "python-jinja2-doc", "python-flask-doc", "python-click-doc",
            "sphinx-doc", "docutils-doc", "mypy-doc", "python-werkzeug-doc", "python-ipython-doc",
            "numba-doc",
        )
    ],
    *[
        Source(f"Rust {name}", MIXED, "docs", "html", (f"{{rust}}/{name}/**/*.html",), cap)
        for name, cap in (
            ("book", 3.0), ("reference", 3.0), ("nomicon", 1.0), ("cargo", 3.0), ("rustc", 4.0),
            ("rustdoc", 1.0), ("error_codes", 2.0), ("edition-guide", 1.0), ("embedded-book", 1.0),
            ("rust-by-example", 2.0), ("unstable-book", 3.0), ("style-guide", 1.0), ("clippy", 1.0),
            ("std", 24.0), ("alloc", 6.0), ("core", 10.0),
        )
    ],
    *_docs("PostgreSQL", 12, "postgresql-doc-15"),
    *_docs("public domain", 12, "sqlite3-doc"),
    *_docs(
        APACHE, 8,
        "apache2-doc", "erlang-doc", "llvm-19-doc", "llvm-14-doc", "clang-19-doc", "clang-14-doc",
        "ant-doc", "tomcat10-docs", "python-celery-doc", "python-tornado-doc", "python-aiohttp-doc",
        "python-requests-doc", "python-coverage-doc", "groovy-doc", "crystal-doc",
    ),
    *_docs(
        APACHE, 5,
        "nova-doc", "neutron-doc", "keystone-doc", "cinder-doc", "glance-doc", "horizon-doc", "swift-doc",
        "ironic-doc", "heat-doc", "octavia-doc", "designate-doc", "manila-doc", "trove-doc",
        "barbican-doc", "sahara-doc", "murano-doc", "aodh-doc", "ceilometer-doc", "watcher-doc",
        "senlin-doc", "placement-doc", "cloudkitty-doc", "python-openstackclient-doc",
        "python-novaclient-doc", "python-oslo.config-doc", "python-oslo.db-doc", "opencv-doc",
    ),
    *_docs(
        MIT, 10,
        "python-sqlalchemy-doc", "twisted-doc", "nodejs-doc", "nim-doc", "python-attr-doc",
        "python-pytest-doc", "python-gevent-doc", "python-setuptools-doc", "python-jsonschema-doc",
        "python-bottle-doc", "python-graphene-doc", "python-pyqtgraph-doc", "python-mako-doc",
    ),
    *_docs(
        BSD, 10,
        "python-sklearn-doc", "python-scipy-doc", "python-pandas-doc", "python-sympy-doc",
        "python-statsmodels-doc", "python-astropy-doc", "python-skimage-doc", "python-dask-doc",
        "python-h5py-doc", "python-babel-doc", "python-scrapy-doc", "python-lxml-doc",
        "python-pygments-doc", "python-nbconvert-doc", "python-mpmath-doc", "python-tables-doc",
        "python-cherrypy3-doc", "python-markdown-doc", "mkdocs-doc", "cmake-doc", "ghc-doc", "nginx-doc",
        "golang-1.19-doc", "varnish-doc", "openmpi-doc", "mpich-doc", "lighttpd-doc",
    ),
    *_docs(APACHE, 6, "python-xarray-doc"),
    *_docs("BSL-1.0", 14, "libboost1.74-doc"),
    Source(
        "perl manual", "Artistic-1.0-Perl", "docs", "pod", ("{docs}/perl-doc/**/*.pod",), 10, ("delta.pod",)
    ),
    *_wheels(
        BSD, 6,
        "numpy", "scipy", "pandas", "sympy", "scikit_learn", "statsmodels", "astropy", "scikit_image",
        "dask", "distributed", "networkx", "numba", "bokeh", "altair", "sphinx", "ipython",
        "jupyter_server", "notebook", "django",
    ),
    *_wheels(
        MIT, 6,
        "sqlalchemy", "twisted", "plotly", "pydantic", "fastapi", "litellm", "langchain",
        "langchain_core", "langchain_community", "llama_index_core", "spacy", "polars", "pytest", "mypy",
        "optuna", "cupy_cuda12x", "azure_mgmt_compute", "azure_mgmt_network",
    ),
    *_wheels(
        APACHE, 6,
        "tensorflow_cpu", "keras", "jax", "flax", "ray", "mlflow", "apache_airflow",
        "apache_airflow_core", "apache_beam", "kubernetes", "google_cloud_aiplatform",
        "google_cloud_compute", "streamlit", "datasets", "diffusers", "accelerate", "peft", "lightning",
        "torchmetrics", "pyarrow", "snowflake_connector_python", "openai", "nltk", "xarray", "moto",
        "aws_cdk_lib", "pulumi_aws", "pulumi_gcp", "pulumi_azure_native",
    ),
    Source(
        "matplotlib docstrings",
        "matplotlib (PSF-like)",
        "docstrings",
        "docstrings",
        ("{wheels}/matplotlib/**/*.py",),
        6,
    ),
    Source("torch docstrings", BSD, "docstrings", "docstrings", ("{site}/torch/**/*.py",), 10),
    Source(
        "transformers docstrings", APACHE, "docstrings", "docstrings", ("{site}/transformers/**/*.py",), 10
    ),
    Source(
        "botocore service models",
        APACHE,
        "api",
        "service",
        ("{wheels}/botocore/botocore/data/**/service-2.json*",),
        60,
    ),
    Source("awscli examples and topics", APACHE, "api", "rst", ("{wheels}/awscli/awscli/**/*.rst",), 8),
    Source(
        "Google API discovery documents",
        APACHE,
        "api",
        "discovery",
        ("{wheels}/google_api_python_client/**/documents/*.json",),
        25,
    ),
    Source("django sources", BSD, "code", "code", ("{wheels}/django/**/*.py",), 5),
]  # fmt: skip
