# The embedded engine on a CPU, for clusters without GPUs (deploy/e2e-kind.sh) and `deploy.engine: embedded`.
#   docker build -f containers/embedded.Dockerfile -t tollbridge/embedded:0.1.0 .
FROM python:3.12.12-slim-bookworm

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY constraints constraints
COPY src src
RUN python -m pip install -c constraints/cpu.txt '.[engine,router]' \
    && useradd --uid 1000 --create-home --shell /usr/sbin/nologin tollbridge
WORKDIR /
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 1000:1000
EXPOSE 8000 7801
ENTRYPOINT []
CMD ["tollbridge", "worker", "--help"]
