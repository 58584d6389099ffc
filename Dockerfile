# Targets: router (no torch), worker-xpu, worker-cuda, worker-cpu. TORCH_INDEX names another index of torch's wheels than PyTorch's own.
#
#   docker build --target router -t baton-router .
#   docker build --target worker-xpu -t baton-worker-xpu .
#
# Everything comes as wheels of locked versions (requirements/, tools/lock_requirements.py). The XPU wheels of torch carry
# the oneAPI run-time libraries they need, so no setvars.sh is sourced and no interactive shell is needed; the driver's user
# part is the distribution's.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim-trixie AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
RUN useradd --uid 10001 --user-group --create-home baton
WORKDIR /app

FROM base AS sources
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY baton_serve baton_serve
COPY kvtransfer kvtransfer
COPY services services
RUN pip wheel --no-deps --wheel-dir /wheels .

# Tokenises, places and streams: its image stays small.
FROM base AS router
COPY requirements/router.txt requirements/
RUN pip install -r requirements/router.txt
RUN --mount=from=sources,source=/wheels,target=/wheels pip install --no-deps /wheels/*.whl
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(os.environ.get('HEALTH_URL', 'http://127.0.0.1:8000/metrics'), timeout=4)"]
ENTRYPOINT ["baton"]
CMD ["router"]

# g++ builds the CPU kernels for the very CPU at first use, and the launchers of Triton's.
FROM base AS worker
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY requirements/worker.txt requirements/
RUN pip install -r requirements/worker.txt

FROM worker AS worker-cpu
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# hadolint ignore=DL3013
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH" && python -c "import torch; assert not torch.version.cuda, torch.__version__"
RUN --mount=from=sources,source=/wheels,target=/wheels pip install --no-deps /wheels/*.whl
USER 10001:10001
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(os.environ.get('HEALTH_URL', 'http://127.0.0.1:7004/health'), timeout=4)"]
ENTRYPOINT ["baton"]
CMD ["--help"]

FROM worker AS worker-cuda
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=
# hadolint ignore=DL3013
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH" && python -c "import torch; assert torch.version.cuda"
RUN --mount=from=sources,source=/wheels,target=/wheels pip install --no-deps /wheels/*.whl
USER 10001:10001
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(os.environ.get('HEALTH_URL', 'http://127.0.0.1:7004/health'), timeout=4)"]
ENTRYPOINT ["baton"]
CMD ["--help"]

# The last target is what a plain `docker build .` makes.
FROM worker AS worker-xpu
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/xpu
# Level Zero: loader, and the compute runtime's back end for Arc.
ARG XPU_PACKAGES="libze1 libze-intel-gpu1"
# hadolint ignore=DL3008,SC2086
RUN apt-get update && apt-get install -y --no-install-recommends $XPU_PACKAGES && rm -rf /var/lib/apt/lists/*
# hadolint ignore=DL3013
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH" \
    && python -c "import torch; assert torch._C._has_xpu, 'TORCH_INDEX must name the index of the XPU wheels'"
RUN --mount=from=sources,source=/wheels,target=/wheels pip install --no-deps /wheels/*.whl
USER 10001:10001
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(os.environ.get('HEALTH_URL', 'http://127.0.0.1:7004/health'), timeout=4)"]
ENTRYPOINT ["baton"]
CMD ["--help"]
