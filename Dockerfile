# The OpenAI-compatible server. torch's own packages bring CUDA, so the image needs only the driver of the host:
#
#   docker build -t triforce-tree .
#   docker run --gpus all -p 8000:8000 -v models:/models triforce-tree --target /models/target --draft /models/draft
#
# Without options it serves the embedded pair, on a CPU too. Set TRIFORCE_TREE_API_KEY where others reach the port.
FROM python:3.12-slim

# Triton and the kernels for CPUs compile with the C compiler on first use.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 server

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY triforce_tree triforce_tree
# hadolint ignore=DL3013
RUN pip install --no-cache-dir '.[server]' && rm -rf /src/*

USER 1000
WORKDIR /home/server
ENV PYTHONUNBUFFERED=1
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=10m \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["triforce-tree", "serve", "--host", "0.0.0.0", "--port", "8000"]
