# One image for each service, with the libraries that it imports: `docker build --target gateway .`
#
# TORCH_INDEX is an extra package index, for a torch without CUDA libraries:
#   docker compose build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu

FROM python:3.11-slim-bookworm AS python
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    GRPC_ENABLE_FORK_SUPPORT=0 \
    GRPC_VERBOSITY=ERROR \
    GRPC_EXPERIMENTS=-event_engine_client,-event_engine_listener \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PATH=/venv/bin:$PATH

# --- what protoc makes ---------------------------------------------------------------------------

FROM python AS protos
RUN python -m venv /venv
WORKDIR /build
COPY pyproject.toml .
# Group and extras are read from pyproject.toml by a current pip, without the sources.
RUN pip install --quiet 'pip>=25.1' && pip install --quiet --group proto
COPY protos protos
RUN python -m grpc_tools.protoc -I protos --python_out=protos --grpc_python_out=protos \
    $(find protos -name '*.proto')

# --- what the C++ compiler makes -----------------------------------------------------------------

FROM python AS kernels
RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends g++ >/dev/null
WORKDIR /build
COPY shared/cpu_kernels shared/cpu_kernels
# Every instruction set of the architecture that the image is built for.
RUN python shared/cpu_kernels/build.py --all

# --- libraries: they change when these files do, not when code does -------------------------

FROM python AS libraries
RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends binutils >/dev/null \
    && python -m venv --without-pip /venv
WORKDIR /build
COPY pyproject.toml constraints.txt LICENSE .ci/install_libraries ./
# The project itself is empty here, its README too: only what it depends on is installed.
RUN mkdir -p services shared protos/tessera && touch README.md services/__init__.py shared/__init__.py

FROM libraries AS gateway-libraries
RUN ./install_libraries gateway,otel

FROM libraries AS scheduler-libraries
RUN ./install_libraries scheduler

FROM libraries AS preprocess-libraries
RUN ./install_libraries preprocess

FROM libraries AS vision-encoder-libraries
ARG TORCH_INDEX=""
RUN ./install_libraries vision-encoder

FROM libraries AS decoder-libraries
ARG TORCH_INDEX=""
RUN ./install_libraries decoder

# --- what runs -----------------------------------------------------------------------------------

FROM python AS base
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin tessera \
    && mkdir -p /model /artifacts && chown tessera: /artifacts
ENV PYTHONPATH=/app:/app/protos \
    TESSERA_LISTEN=0.0.0.0:50051 \
    TESSERA_HEARTBEAT=/tmp/heartbeat \
    TESSERA_ARTIFACT_DIR=/artifacts
WORKDIR /app
EXPOSE 50051
STOPSIGNAL SIGTERM
# Often while it starts, so that the next one need not wait; seldom later, for each check costs a process.
HEALTHCHECK --interval=10s --start-interval=2s --start-period=600s --timeout=5s --retries=3 \
    CMD ["python", "-m", "shared.net.healthcheck", "/tmp/heartbeat"]
LABEL org.opencontainers.image.title="Tessera" \
      org.opencontainers.image.description="Serves vision-language models" \
      org.opencontainers.image.licenses="Apache-2.0"

FROM base AS gateway
COPY --from=gateway-libraries /venv /venv
COPY --from=protos /build/protos protos
COPY shared shared
COPY services/__init__.py services/__init__.py
COPY services/families services/families
COPY services/gateway services/gateway
ENV TESSERA_GATEWAY_HOST=0.0.0.0 TESSERA_GATEWAY_PORT=8000 TESSERA_GATEWAY_GRPC_PORT=8001
EXPOSE 8000 8001
# Here and in each service below: a container writes no bytecode, and would compile its sources at every start.
RUN python -m compileall -q .
USER tessera
CMD ["python", "-m", "services.gateway"]

FROM base AS scheduler
COPY --from=scheduler-libraries /venv /venv
COPY --from=protos /build/protos protos
COPY shared shared
COPY services/__init__.py services/__init__.py
COPY services/scheduler services/scheduler
RUN python -m compileall -q .
USER tessera
CMD ["python", "-m", "services.scheduler"]

FROM base AS preprocess
COPY --from=preprocess-libraries /venv /venv
COPY --from=protos /build/protos protos
COPY shared shared
COPY services/__init__.py services/__init__.py
COPY services/families services/families
COPY services/preprocess services/preprocess
RUN python -m compileall -q .
USER tessera
CMD ["python", "-m", "services.preprocess"]

FROM base AS vision-encoder
COPY --from=vision-encoder-libraries /venv /venv
COPY --from=protos /build/protos protos
COPY shared shared
COPY services/__init__.py services/__init__.py
COPY services/families services/families
COPY services/vision_encoder services/vision_encoder
COPY --from=kernels /build/shared/cpu_kernels/build shared/cpu_kernels/build
# The services of a host agree on the fastest kernels.
ENV TESSERA_CPU_TRIAL_DIR=/artifacts
RUN python -m compileall -q .
USER tessera
CMD ["python", "-m", "services.vision_encoder"]

FROM base AS decoder
COPY --from=decoder-libraries /venv /venv
COPY --from=protos /build/protos protos
COPY shared shared
COPY services/__init__.py services/__init__.py
COPY services/families services/families
COPY services/decoder services/decoder
# For the comparison of prompts with pictures with a model's own class.
COPY services/comparison services/comparison
COPY services/preprocess services/preprocess
COPY services/vision_encoder services/vision_encoder
COPY --from=kernels /build/shared/cpu_kernels/build shared/cpu_kernels/build
# The services of a host agree on the fastest kernels.
ENV TESSERA_CPU_TRIAL_DIR=/artifacts
RUN python -m compileall -q .
USER tessera
CMD ["python", "-m", "services.decoder"]
